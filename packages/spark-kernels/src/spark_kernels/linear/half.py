"""Linear layers over fp16 weights on the CPU: FBGEMM's packed matrix product with fp32 activations and sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml import GgmlTensor

_LARGEST_HALF = torch.finfo(torch.float16).max


class HalfLinear:
    """Weights rounded to fp16 once; a row's result does not depend on the other rows."""

    def __init__(self, parts: Sequence[Tensor | GgmlTensor], *, bias: Tensor | None) -> None:
        """Raises UnsupportedShapeError if a weight is too large for fp16: such a checkpoint wants dtype float32."""
        weight = torch.cat([part.dequantize() if isinstance(part, GgmlTensor) else part.float() for part in parts])
        self.in_features: int = weight.shape[1]
        self.out_features: int = weight.shape[0]
        if weight.numel() and weight.abs().max().item() > _LARGEST_HALF:
            raise UnsupportedShapeError(
                f"linear [{self.out_features}, {self.in_features}]: a weight is {weight.abs().max().item():g}, "
                f"fp16 ends at {_LARGEST_HALF:g}; run with dtype float32"
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        return result.to(x.dtype)
