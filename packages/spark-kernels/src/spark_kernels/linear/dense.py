"""Linear layers over dense weights, and embeddings that keep their rows as they came."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor


class DenseLinear:
    """Weight kept as [K, N] of one dtype; block-quantised parts are turned into numbers at creation."""

    def __init__(
        self,
        parts: Sequence[Tensor | GgmlTensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        bias: Tensor | None,
    ) -> None:
        self.in_features: int = parts[0].shape[1]
        self.out_features: int = sum(part.shape[0] for part in parts)
        self._weight = torch.empty(self.in_features, self.out_features, dtype=dtype, device=device)
        start = 0
        for part in parts:
            rows = part.dequantize() if isinstance(part, GgmlTensor) else part
            self._weight[:, start : start + rows.shape[0]] = rows.T
            start += rows.shape[0]
        self._bias = None if bias is None else bias.to(device=device, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self._weight.dtype)
        result = wide @ self._weight if self._bias is None else torch.addmm(self._bias, wide, self._weight)
        return result.to(x.dtype)


class DenseEmbedding:
    """Rows of `dtype`, made from the stored ones when they are asked for."""

    def __init__(self, weight: Tensor | GgmlTensor, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.num_rows: int = weight.shape[0]
        self.row_size: int = weight.shape[1]
        self._weight = weight.to(device)
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        if isinstance(self._weight, GgmlTensor):
            return self._weight.select_rows(ids).dequantize(self._dtype)
        return self._weight[ids].to(self._dtype)
