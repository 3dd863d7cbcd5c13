"""Paged attention in plain torch: the definition, on any device."""

import torch
from torch import Tensor

from spark_kernels.paged_attention.batch import PagedBatch


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    flat = (-1, *k_cache.shape[2:])
    k_cache.view(flat).index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.view(flat).index_copy_(0, slots, v.to(v_cache.dtype))


def paged_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    block_size = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    outputs = []
    for index, context in enumerate(batch.context_lengths):
        start, end = batch.query_starts[index], batch.query_starts[index + 1]
        blocks = batch.block_table[index, : -(-context // block_size)]
        keys = k_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)  # [context, H, D]
        values = v_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,chd->htc", q[start:end].float(), keys) * scale
        query_positions = torch.arange(context - (end - start), context, device=q.device)
        is_future = torch.arange(context, device=q.device)[None, :] > query_positions[:, None]
        weights = scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("htc,chd->thd", weights, values))
    return torch.cat(outputs).to(q.dtype)
