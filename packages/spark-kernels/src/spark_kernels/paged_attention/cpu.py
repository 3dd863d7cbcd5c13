"""Paged attention on the CPU: torch's fused attention, called as `plan` says."""

import torch
from torch import Tensor

from spark_kernels.paged_attention.batch import PagedBatch
from spark_kernels.paged_attention.plan import CpuPlan, Group, Single

_attend = torch.nn.functional.scaled_dot_product_attention


def paged_attention_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """One token a sequence is computed in the cache's dtype, since its cost is the reading of the cache; a prefill in q's."""
    plan = batch.cpu_plan(k_cache.shape[1])
    if plan.is_one_group:
        return _attend_group(q, k_cache, v_cache, plan, plan.groups[0], scale)
    if len(plan.singles) == 1 and not plan.groups:
        return _attend_single(q, k_cache, v_cache, plan, plan.singles[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype)
    for single in plan.singles:
        mine = q[single.start : single.end]
        out[single.start : single.end] = _attend_single(mine, k_cache, v_cache, plan, single, scale)
    for group in plan.groups:
        out[group.rows] = _attend_group(q[group.rows], k_cache, v_cache, plan, group, scale)
    return out


def _attend_group(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuPlan, group: Group, scale: float) -> Tensor:
    """q [G, H, D] to [G, H, D]. The query heads of a KV head are so many queries of it: no key is read twice."""
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    sides = []
    for cache, scratch in zip((k_cache, v_cache), plan.scratch(k_cache), strict=True):
        copied = torch.index_select(
            cache.view(-1, num_kv_heads * head_dim), 0, group.slots, out=scratch[: group.slots.shape[0]]
        )
        sides.append(copied.view(num_sequences, group.context, num_kv_heads, head_dim).transpose(1, 2))
    grouped = q.to(k_cache.dtype).reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = None if group.mask is None else group.mask.to(k_cache.dtype)
    return _attend(grouped, sides[0], sides[1], attn_mask=mask, scale=scale).reshape(q.shape).to(q.dtype)


def _attend_single(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuPlan, single: Single, scale: float) -> Tensor:
    """q [n, H, D] of one sequence to [n, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    keys, values = _keys_and_values(k_cache, v_cache, plan, single)
    if num_tokens == 1:
        grouped = q.to(keys.dtype).reshape(1, num_kv_heads, group, head_dim)
        return _attend(grouped, keys, values, scale=scale).reshape(q.shape).to(q.dtype)
    spread = num_kv_heads, group, single.context, head_dim  # KV heads as the batch; a group's heads share its memory
    out = _attend(
        q.reshape(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys[0].to(q.dtype)[:, None].expand(spread),
        values[0].to(q.dtype)[:, None].expand(spread),
        attn_mask=None if single.mask is None else single.mask.to(q.dtype),
        is_causal=single.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _keys_and_values(k_cache: Tensor, v_cache: Tensor, plan: CpuPlan, single: Single) -> tuple[Tensor, Tensor]:
    """[1, KH, context, D] each: views of the cache, or of scratch memory."""
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    row = num_kv_heads * head_dim
    shape, strides = (1, num_kv_heads, single.context, head_dim), (0, head_dim, row, 1)
    if single.first_block is not None:
        first = single.first_block * block_size * row
        return (
            k_cache.as_strided(shape, strides, k_cache.storage_offset() + first),
            v_cache.as_strided(shape, strides, v_cache.storage_offset() + first),
        )
    sides = []
    for cache, scratch in zip((k_cache, v_cache), plan.scratch(k_cache), strict=True):
        needed = scratch[: single.blocks.shape[0] * block_size]
        torch.index_select(cache.view(num_blocks, -1), 0, single.blocks, out=needed.view(-1, block_size * row))
        sides.append(needed.as_strided(shape, strides))
    return sides[0], sides[1]
