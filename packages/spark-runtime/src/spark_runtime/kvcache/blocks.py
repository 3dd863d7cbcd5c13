"""Block allocator for the KV pool. No torch.

Blocks are reference counted, so that sequences can share one. All sizes are in blocks, never in bytes or tokens.
A sequence whose blocks are consecutive can be read through one view of the pool, without a copy. Sequences grow, so the
blocks of a new one are put where it and the one before it both have room behind them, and `extend` uses that room.
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
        """Take `count` free blocks, each with one reference: out of the longest free run, or of several if it is too short.

        They stand in the middle of the run, because the blocks before the run may have to grow into it; only a run that
        starts the pool has none before it. Raises OutOfBlocksError, and takes nothing, when fewer are free.
        """
        self._check_enough(count)
        blocks: list[BlockId] = []
        while (missing := count - len(blocks)) > 0:
            start = max(self._run_starts, key=self._run_lengths.__getitem__)
            length = self._run_lengths[start]
            taken = min(missing, length)
            blocks += self._take(start, (length - taken) // 2 if start > 0 else 0, taken)
        return blocks

    def extend(self, blocks: list[BlockId], count: int) -> None:
        """Append `count` free blocks, each with one reference: those right behind the last one, else as from `allocate`.

        Raises OutOfBlocksError, and takes nothing, when fewer are free.
        """
        self._check_enough(count)
        if blocks:
            if self._counts[blocks[-1]] == 0:
                raise ValueError(f"block {blocks[-1]} is free and cannot be extended")
            behind = blocks[-1] + 1
            if taken := min(count, self._run_lengths.get(behind, 0)):
                blocks += self._take(behind, 0, taken)
                count -= taken
        blocks += self.allocate(count)

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

    def _check_enough(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > self._num_free:
            raise OutOfBlocksError(f"KV pool: {count} blocks wanted, {self._num_free} of {self.num_blocks} are free")

    def _take(self, start: int, offset: int, count: int) -> list[BlockId]:
        """Take `count` blocks out of the free run at `start`, beginning `offset` blocks into it; 0 < count."""
        first, end = start + offset, start + self._run_lengths.pop(start)
        behind = first + count
        rest = {before: until - before for before, until in ((start, first), (behind, end)) if before < until}
        index = bisect_left(self._run_starts, start)
        self._run_starts[index : index + 1] = rest
        self._run_lengths.update(rest)
        self._counts[first:behind] = [1] * count
        self._num_free -= count
        return [BlockId(block) for block in range(first, behind)]

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
