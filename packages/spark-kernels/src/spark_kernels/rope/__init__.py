"""Rotary position embedding of queries and keys, half-split layout (dimension i turns with i + R/2)."""

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rope.cpu import rotate_cpu
from spark_kernels.rope.reference import rotate_reference

__all__ = ["apply_rope"]


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R = 2 * cos.shape[-1] dimensions of each head; return new (q, k) of the same dtypes.

    q          [T, H, D]
    k          [T, KH, D]
    cos, sin   [T, R/2]    fp32, of each token's position, scaling included; R <= D

    Raises UnsupportedShapeError if T differs or R > D.
    """
    num_tokens, rotary = cos.shape[0], 2 * cos.shape[-1]
    if not (q.shape[0] == k.shape[0] == num_tokens and q.shape[-1] == k.shape[-1] >= rotary and sin.shape == cos.shape):
        raise UnsupportedShapeError(
            f"apply_rope: q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; "
            "wanted [T, H, D], [T, KH, D] and twice [T, R/2] with R <= D"
        )
    if q.device.type == "cpu" and q.dtype == k.dtype == torch.float32 and rotary == q.shape[-1]:
        return rotate_cpu(q, k, cos, sin)
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
