"""Paged attention on the CPU: torch's fused attention, sequence by sequence, on views of the cache where blocks follow.

What was measured is in docs/log.md: gathering all sequences into one padded batch costs twice as much as this loop with
200 tokens in the cache and four times as much with 1,000, and it would read what other sequences left behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.paged_attention.batch import PagedBatch

_attend = torch.nn.functional.scaled_dot_product_attention


@dataclass(slots=True)
class SequencePlan:
    """Where one sequence's queries, keys and values lie.

    start, end     its tokens of this step
    context        tokens in the cache
    first_block    the first of its blocks if they follow one another, else None
    blocks         int64, its blocks; used where they do not
    mask           fp32 [end - start, context], 0 or -inf; only for a chunk that has a history
    """

    start: int
    end: int
    context: int
    first_block: int | None
    blocks: Tensor
    mask: Tensor | None


class CpuPlan:
    """What all layers of a step share: the sequences, and memory to gather scattered blocks into."""

    def __init__(self, batch: PagedBatch, block_size: int) -> None:
        self.sequences = [_plan_sequence(batch, index, block_size) for index in range(len(batch.context_lengths))]
        self._scratch: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = {}
        self._most_blocks = max((s.blocks.shape[0] for s in self.sequences if s.first_block is None), default=0)

    def keys_and_values(self, sequence: SequencePlan, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[context, KH, D] each: views of the cache, or of memory that the next call overwrites."""
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        if sequence.first_block is not None:
            first = sequence.first_block * block_size
            where = slice(first, first + sequence.context)
            flat = (-1, num_kv_heads, head_dim)
            return k_cache.view(flat)[where], v_cache.view(flat)[where]
        gathered = []
        for cache, scratch in zip((k_cache, v_cache), self._scratch_for(k_cache), strict=True):
            target = scratch[: sequence.blocks.shape[0]]
            torch.index_select(cache.view(cache.shape[0], -1), 0, sequence.blocks, out=target)
            gathered.append(target.view(-1, num_kv_heads, head_dim)[: sequence.context])
        return gathered[0], gathered[1]

    def _scratch_for(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        width = cache[0].numel()
        key = cache.dtype, width
        if key not in self._scratch:
            shape = self._most_blocks, width
            self._scratch[key] = torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype)
        return self._scratch[key]


def _plan_sequence(batch: PagedBatch, index: int, block_size: int) -> SequencePlan:
    start, end, context = batch.query_starts[index], batch.query_starts[index + 1], batch.context_lengths[index]
    blocks = batch.block_table[index, : -(-context // block_size)]
    numbers = blocks.tolist()
    follows = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    mask = None
    if 1 < end - start < context:
        mask = torch.full((end - start, context), float("-inf")).triu_(context - (end - start) + 1)
    return SequencePlan(start, end, context, numbers[0] if follows else None, blocks, mask)


def paged_attention_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    plan = batch.cpu_plan(k_cache.shape[1])
    outputs = []
    for sequence in plan.sequences:
        keys, values = plan.keys_and_values(sequence, k_cache, v_cache)
        outputs.append(_attend_sequence(q[sequence.start : sequence.end], keys, values, sequence.mask, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_sequence(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [n, H, D] over keys and values [context, KH, D] to [n, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    context, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    if keys.dtype != q.dtype:
        keys, values = keys.to(q.dtype), values.to(q.dtype)
    if num_tokens == 1:  # the query heads of a group are so many queries of one head: no key is read twice
        grouped = q.reshape(1, num_kv_heads, group, head_dim)
        out = _attend(grouped, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scale)
        return out.reshape(1, num_heads, head_dim)
    spread = num_kv_heads, group, context, head_dim
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # KV heads as the batch
    out = _attend(
        grouped,
        keys.transpose(0, 1)[:, None].expand(spread),
        values.transpose(0, 1)[:, None].expand(spread),
        attn_mask=None if mask is None else mask.to(q.dtype),
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
