"""How the CPU runs one step's attention: worked out once, used by every layer.

What was measured is in docs/log.md. One fused call over several decoding sequences beats a loop over them although it
copies their keys and values first, as long as the copy stays in the cache; long and prefilling sequences go alone, on
views of the KV cache where their blocks follow one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.paged_attention.batch import PagedBatch

# Tokens that decoding sequences of one group may have together, padding included: 2048 tokens of SmolLM2's keys are 1.5 MiB.
GROUP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Single:
    """One sequence on its own.

    start, end    its tokens of this step
    context       tokens in the cache
    first_block   the first of its blocks if they follow one another, else None
    blocks        int64, its blocks
    mask          fp32 [end - start, context], 0 or -inf; None for one token and for a prefill without history
    """

    start: int
    end: int
    context: int
    first_block: int | None
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """G decoding sequences of similar length C or less, copied side by side.

    rows    int64 [G], their tokens of this step
    slots   int64 [G * C]; past a sequence's end its own last token again, so that nothing of others is read
    mask    fp32 [G, 1, 1, C], 0 or -inf; None where all have C tokens
    """

    rows: Tensor
    slots: Tensor
    context: int
    mask: Tensor | None


class CpuPlan:
    """The singles and groups of a step. If `is_one_group`, the group's rows are the whole step in order."""

    def __init__(self, batch: PagedBatch, block_size: int) -> None:
        counts = [end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
        contexts = batch.context_lengths
        decoding = sorted((i for i, count in enumerate(counts) if count == 1), key=lambda i: -contexts[i])
        members = group_by_length(decoding, contexts)
        alone = [i for i, count in enumerate(counts) if count > 1] + [g[0] for g in members if len(g) == 1]
        self.singles = [_plan_single(batch, i, block_size) for i in alone]
        self.groups = [_plan_group(batch, sorted(g), block_size) for g in members if len(g) > 1]
        self.is_one_group = not self.singles and len(self.groups) == 1
        self._num_tokens = max(
            (*(g.slots.shape[0] for g in self.groups), *(s.blocks.shape[0] * block_size for s in self.singles)),
            default=0,
        )
        self._scratch: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def scratch(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Memory [tokens, KH * D] twice for copies of keys and values; the next call hands out the same."""
        width = cache.shape[2] * cache.shape[3]
        key = cache.dtype, width
        if key not in self._scratch:
            shape = self._num_tokens, width
            self._scratch[key] = torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype)
        return self._scratch[key]


def group_by_length(decoding: Sequence[int], contexts: Sequence[int]) -> list[list[int]]:
    """Split sequences, longest first, so that a group pads none to more than twice its length."""
    groups: list[list[int]] = []
    for index in decoding:
        longest = contexts[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS and 2 * contexts[index] >= longest:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _plan_single(batch: PagedBatch, index: int, block_size: int) -> Single:
    start, end, context = batch.query_starts[index], batch.query_starts[index + 1], batch.context_lengths[index]
    blocks = batch.block_table[index, : -(-context // block_size)]
    numbers = blocks.tolist()
    follows = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    mask = None
    if 1 < end - start < context:
        mask = torch.full((end - start, context), float("-inf")).triu_(context - (end - start) + 1)
    return Single(start, end, context, numbers[0] if follows else None, blocks, mask)


def _plan_group(batch: PagedBatch, members: Sequence[int], block_size: int) -> Group:
    lengths = torch.tensor([batch.context_lengths[i] for i in members]).unsqueeze(1)  # [G, 1]
    context = int(lengths.max())
    positions = torch.arange(context).unsqueeze(0)
    own = torch.minimum(positions, lengths - 1)  # [G, C]
    blocks = batch.block_table[list(members)].gather(1, own // block_size)
    mask = None
    if int(lengths.min()) < context:
        mask = torch.zeros(own.shape).masked_fill_(positions >= lengths, float("-inf"))[:, None, None, :]
    rows = torch.tensor([batch.query_starts[i] for i in members])
    return Group(rows, (blocks * block_size + own % block_size).flatten(), context, mask)
