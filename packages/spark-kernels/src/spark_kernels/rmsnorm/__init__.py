"""Root mean square norm over the last dimension, alone or with the residual sum before it."""

from collections.abc import Callable

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rmsnorm.cpu import rmsnorm_cpu
from spark_kernels.rmsnorm.reference import rmsnorm_reference

__all__ = ["add_rmsnorm", "rmsnorm"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x.

    x        [..., K]  fp32, bf16 or fp16
    weight   [K]       any of these; the maths is fp32, the result has x.dtype

    Raises UnsupportedShapeError if K differs.
    """
    _check_weight(x, weight)
    return _choose_rmsnorm(x)(x, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rmsnorm(x + residual), x + residual), shapes as in `rmsnorm`; no argument is changed."""
    _check_weight(x, weight)
    if residual.shape != x.shape:
        raise UnsupportedShapeError(f"add_rmsnorm: residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
    total = x + residual
    return _choose_rmsnorm(total)(total, weight, eps), total


def _choose_rmsnorm(x: Tensor) -> Callable[[Tensor, Tensor, float], Tensor]:
    """On the CPU in fp32 the shorter chain of kernels: 20 µs where the reference takes 33 (8 rows of 576)."""
    return rmsnorm_cpu if x.device.type == "cpu" and x.dtype == torch.float32 else rmsnorm_reference


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise UnsupportedShapeError(f"rmsnorm: weight is {tuple(weight.shape)}, x is {tuple(x.shape)}; wanted [K]")
