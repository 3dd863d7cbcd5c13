"""Linear layers over fp16 weights on the CPU: FBGEMM's packed matrix product with fp32 activations and sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml import GgmlTensor

# FBGEMM packs whole blocks of so many columns; a block of 64 columns takes the memory of 512.
PACKED_COLUMNS = 512
_LARGEST_HALF = torch.finfo(torch.float16).max


class HalfLinear:
    """Weights rounded to fp16 once.

    The columns past the last whole block of FBGEMM stay apart as fp32 [tail, N] where that takes less memory.
    """

    def __init__(self, parts: Sequence[Tensor | GgmlTensor], *, bias: Tensor | None) -> None:
        """Raises UnsupportedShapeError if a weight is too large for fp16: such a checkpoint wants dtype float32."""
        numbers = [part.dequantize() if isinstance(part, GgmlTensor) else part.float() for part in parts]
        weight = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        del numbers
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        smallest, largest = (bound.item() for bound in weight.aminmax())
        if max(-smallest, largest) > _LARGEST_HALF:
            raise UnsupportedShapeError(
                f"linear [{self.out_features}, {self.in_features}]: weights go from {smallest:g} to {largest:g}, "
                f"fp16 ends at {_LARGEST_HALF:g}; run with dtype float32"
            )
        self._packed_columns = choose_packed_columns(self.in_features)
        packable = weight[:, : self._packed_columns].contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(packable, None if bias is None else bias.float())
        self._tail: Tensor | None = None
        if self._packed_columns < self.in_features:
            self._tail = weight[:, self._packed_columns :].T.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self._tail is None:
            result: Tensor = torch.ops.quantized.linear_dynamic_fp16(wide, self._packed)
        else:
            result = torch.ops.quantized.linear_dynamic_fp16(wide[:, : self._packed_columns], self._packed)
            result.addmm_(wide[:, self._packed_columns :], self._tail)
        return result.to(x.dtype)


def choose_packed_columns(columns: int) -> int:
    """How many columns FBGEMM packs: all, or all but a tail that takes less memory in fp32 than in a block of fp16."""
    tail = columns % PACKED_COLUMNS
    is_smaller_apart = tail * torch.float32.itemsize < PACKED_COLUMNS * torch.float16.itemsize
    return columns - tail if tail < columns and is_smaller_apart else columns
