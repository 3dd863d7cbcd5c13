"""Block allocator for the KV pool. No torch.

Blocks are reference counted, so that sequences can share one. All sizes are in blocks, never in bytes or tokens.
A sequence whose blocks are consecutive can be read through one view of the pool, without a copy, so a request is met
by a single run of consecutive blocks where one is long enough.
Not thread safe: only the scheduler's thread calls it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from spark_runtime.errors import OutOfBlocksError
from spark_runtime.types import BlockId


class BlockAllocator:
    """Hands out the block ids 0 .. num_blocks - 1. Free blocks are kept as maximal runs, ordered by their first id."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise OutOfBlocksError(f"KV pool: {num_blocks} blocks, at least 1 is needed; give the KV cache more memory")
        self._counts = [0] * num_blocks
        self._run_starts = [0]
        self._run_lengths = {0: num_blocks}
        self._num_free = num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return self._num_free

    def reference_count(self, block: BlockId) -> int:
        return self._counts[block]

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` free blocks, each with one reference: the shortest run that holds them all, else few long runs.

        Raises OutOfBlocksError, and takes nothing, when fewer are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self._num_free:
            raise OutOfBlocksError(f"KV pool: {count} blocks wanted, {self._num_free} of {self.num_blocks} are free")
        blocks: list[int] = []
        while (missing := count - len(blocks)) > 0:
            start = self._choose_run(missing)
            taken = min(missing, self._run_lengths[start])
            self._shorten_run(start, taken)
            blocks.extend(range(start, start + taken))
        for block in blocks:
            self._counts[block] = 1
        self._num_free -= count
        return [BlockId(block) for block in blocks]

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of these blocks, which must be in use."""
        for block in blocks:
            if self._counts[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._counts[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Take one reference from each of these different blocks; those without one left are free again."""
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {list(blocks)} name one block twice")
        for block in blocks:
            if self._counts[block] == 0:
                raise ValueError(f"block {block} is free already")
        freed = []
        for block in blocks:
            self._counts[block] -= 1
            if self._counts[block] == 0:
                freed.append(block)
        for start, length in _runs(sorted(freed)):
            self._add_run(start, length)
        self._num_free += len(freed)

    def _choose_run(self, count: int) -> int:
        lengths = self._run_lengths
        fitting = [start for start in self._run_starts if lengths[start] >= count]
        if fitting:
            return min(fitting, key=lambda start: lengths[start])
        return max(self._run_starts, key=lambda start: lengths[start])

    def _shorten_run(self, start: int, count: int) -> None:
        """Remove the first `count` blocks of the run at `start`."""
        index = bisect_left(self._run_starts, start)
        length = self._run_lengths.pop(start)
        if count == length:
            del self._run_starts[index]
        else:
            self._run_starts[index] = start + count
            self._run_lengths[start + count] = length - count

    def _add_run(self, start: int, length: int) -> None:
        """Put blocks start .. start + length - 1 back, joined with the free runs that touch them."""
        index = bisect_left(self._run_starts, start)
        if index < len(self._run_starts) and self._run_starts[index] == start + length:
            length += self._run_lengths.pop(self._run_starts.pop(index))
        if index > 0:
            previous = self._run_starts[index - 1]
            if previous + self._run_lengths[previous] == start:
                self._run_lengths[previous] += length
                return
        insort(self._run_starts, start)
        self._run_lengths[start] = length


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """The runs of consecutive ids in an ascending sequence, as (first id, length)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
