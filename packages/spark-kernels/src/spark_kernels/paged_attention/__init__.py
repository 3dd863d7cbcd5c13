"""Causal attention over a KV cache of fixed blocks, any mix of decode tokens and prefill chunks."""

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.paged_attention.batch import PagedBatch
from spark_kernels.paged_attention.cpu import paged_attention_cpu
from spark_kernels.paged_attention.reference import paged_attention_reference, write_kv_reference

__all__ = ["PagedBatch", "paged_attention", "write_kv"]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value in its slot, rounded to the cache's dtype.

    k, v               [T, KH, D]
    k_cache, v_cache   [num_blocks, block_size, KH, D]  contiguous, changed in place
    slots              int64 [T]  block * block_size + offset; each at most once
    """
    write_kv_reference(k, v, k_cache, v_cache, slots)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Attend each token to its own sequence's tokens up to and with itself; `write_kv` has stored them.

    q                  [T, H, D]
    k_cache, v_cache   [num_blocks, block_size, KH, D]  contiguous; query head h reads KV head h // (H / KH)
    returns            [T, H, D]  q.dtype

    Raises UnsupportedShapeError if T is not the batch's, D differs, H is not a multiple of KH or a cache has gaps.
    """
    if (
        q.shape[0] != batch.query_starts[-1]
        or q.shape[-1] != k_cache.shape[-1]
        or q.shape[1] % k_cache.shape[2]
        or k_cache.shape != v_cache.shape
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
    ):
        raise UnsupportedShapeError(
            f"paged_attention: q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}, "
            f"{batch.query_starts[-1]} tokens in the batch; "
            "wanted [T, H, D] and twice [num_blocks, block_size, KH, D], contiguous"
        )
    if q.device.type == "cpu":
        return paged_attention_cpu(q, k_cache, v_cache, batch, scale)
    return paged_attention_reference(q, k_cache, v_cache, batch, scale)
