"""Root mean square norm over the last dimension, alone or with the residual sum before it."""

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rmsnorm.reference import add_rmsnorm_reference, rmsnorm_reference

__all__ = ["add_rmsnorm", "rmsnorm"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x.

    x        [..., K]  fp32, bf16 or fp16
    weight   [K]       any of these; the maths is fp32, the result has x.dtype

    Raises UnsupportedShapeError if K differs.
    """
    _check_weight(x, weight)
    return rmsnorm_reference(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rmsnorm(x + residual), x + residual), shapes as in `rmsnorm`; no argument is changed."""
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise UnsupportedShapeError(f"add_rmsnorm: residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    return add_rmsnorm_reference(x, residual, weight, eps)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise UnsupportedShapeError(f"rmsnorm: weight is {tuple(weight.shape)}, x is {tuple(x.shape)}; wanted [K]")
