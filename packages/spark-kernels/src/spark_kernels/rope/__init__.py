"""Rotary position embedding of queries and keys, half-split layout (dimension i turns with i + R/2)."""

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rope.cpu import rotate_cpu
from spark_kernels.rope.reference import rotate_reference

__all__ = ["apply_rope", "widen_tables"]


def widen_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables [T, R/2] to [T, 1, R] as `apply_rope` also takes them: (cos, cos) and (-sin, sin).

    Made once a step, they save every layer the making of them.
    """
    return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of each head; return new (q, k) of the same dtypes.

    q          [T, H, D]
    k          [T, KH, D]
    cos, sin   [T, R/2]    fp32, of each token's position, scaling included; R <= D
               or [T, 1, R], what `widen_tables` made of them

    Raises UnsupportedShapeError if T differs or R > D.
    """
    is_wide = cos.ndim == 3
    rotary = cos.shape[-1] if is_wide else 2 * cos.shape[-1]
    if not (
        q.shape[0] == k.shape[0] == cos.shape[0] and q.shape[-1] == k.shape[-1] >= rotary and sin.shape == cos.shape
    ):
        raise UnsupportedShapeError(
            f"apply_rope: q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; "
            "wanted [T, H, D], [T, KH, D] and twice [T, R/2] or [T, 1, R] with R <= D"
        )
    if q.device.type == "cpu" and q.dtype == k.dtype and rotary == q.shape[-1]:
        return rotate_cpu(q, k, *((cos, sin) if is_wide else widen_tables(cos, sin)))
    if is_wide:
        half = rotary // 2
        cos, sin = cos[:, 0, half:], sin[:, 0, half:]
    return rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
