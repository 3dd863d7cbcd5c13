"""Linear layers and embeddings over dense or block-quantised weights; the implementation is chosen once, at creation."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml import GgmlTensor
from spark_kernels.linear.config import choose_linear
from spark_kernels.linear.dense import DenseEmbedding, DenseLinear
from spark_kernels.linear.half import HalfLinear
from spark_kernels.linear.int4 import Int4Linear

__all__ = ["Embedding", "Linear", "create_embedding", "create_linear"]


class Linear(Protocol):
    """x [T, K] to x @ W.T + bias [T, N]; W has in_features K and out_features N.

    The result is of x.dtype, or bf16 where the implementation rounds to that anyway (4-bit weights and few tokens).
    """

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...


class Embedding(Protocol):
    """ids int64 [T] to rows [T, K] of the table, which has `num_rows` rows of `row_size`."""

    num_rows: int
    row_size: int

    def __call__(self, ids: Tensor) -> Tensor: ...


def create_linear(
    parts: Sequence[Tensor | GgmlTensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    bias: Tensor | None = None,
) -> Linear:
    """A layer whose weight is the rows of all parts below one another, e.g. q, k, v or gate, up.

    parts   each [N_i, K]; dense ones are rounded to dtype
    bias    [sum of N_i]

    Raises UnsupportedShapeError if the parts' K differ or the bias does not fit.
    """
    rows = sum(part.shape[0] for part in parts)
    if not parts or any(len(part.shape) != 2 or part.shape[1] != parts[0].shape[1] for part in parts):
        raise UnsupportedShapeError(f"create_linear: parts {[tuple(p.shape) for p in parts]}; wanted [N, K] of one K")
    if bias is not None and bias.shape != (rows,):
        raise UnsupportedShapeError(f"create_linear: bias {tuple(bias.shape)} for {rows} rows")
    choice = choose_linear(
        parts, dtype=dtype, device=torch.device(device), engines=torch.backends.quantized.supported_engines
    )
    match choice.kind:
        case "int4":
            return Int4Linear([part for part in parts if isinstance(part, GgmlTensor)], bias=bias)
        case "half":
            return HalfLinear(parts, bias=bias)
        case "dense":
            return DenseLinear(parts, dtype=dtype, device=device, bias=bias)


def create_embedding(weight: Tensor | GgmlTensor, *, dtype: torch.dtype, device: torch.device | str) -> Embedding:
    """A table [rows, K] that hands out rows of `dtype`. Raises UnsupportedShapeError if weight is not [rows, K]."""
    if len(weight.shape) != 2:
        raise UnsupportedShapeError(f"create_embedding: weight {tuple(weight.shape)}; wanted [rows, K]")
    return DenseEmbedding(weight, dtype=dtype, device=device)
