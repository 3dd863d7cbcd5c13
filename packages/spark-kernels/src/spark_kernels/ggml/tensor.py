"""A weight as a GGUF file stores it: bytes in blocks, not yet numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml.reference import dequantize_blocks
from spark_kernels.ggml.types import GgmlType


@dataclass(frozen=True, slots=True, eq=False)
class GgmlTensor:
    """A quantised (or dense) weight in its stored bytes; may be a view of a mapped file, so never write to it.

    shape   of the weights: (rows, columns), (experts, rows, columns) or (columns,)
    data    uint8 [*shape[:-1], row_bytes], row_bytes = type.row_bytes(columns)

    Raises UnsupportedShapeError if shape and data do not fit each other.
    """

    type: GgmlType
    shape: tuple[int, ...]
    data: Tensor

    def __post_init__(self) -> None:
        try:
            wanted = (*self.shape[:-1], self.type.row_bytes(self.shape[-1]))
        except (ValueError, IndexError) as error:
            raise UnsupportedShapeError(f"ggml tensor of shape {list(self.shape)}: {error}") from error
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != wanted:
            got = f"{self.data.dtype} {list(self.data.shape)}"
            raise UnsupportedShapeError(
                f"ggml tensor {self.type.name} {list(self.shape)}: data is {got}, wanted torch.uint8 {list(wanted)}"
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights as a dense tensor of `shape`, rounded once from fp32 to `dtype`; on the device of `data`."""
        blocks = self.data.reshape(-1, self.type.type_size)
        return dequantize_blocks(self.type, blocks, dtype).view(self.shape)

    def select_rows(self, index: Tensor | slice) -> "GgmlTensor":
        """Rows `index` (int64 [R], or a slice: a view) of the first dimension, still in blocks.

        For an expert tensor that is whole experts. Raises UnsupportedShapeError for a tensor of one dimension.
        """
        if len(self.shape) < 2:
            raise UnsupportedShapeError(f"ggml tensor of shape {list(self.shape)} has no rows to select")
        data = self.data[index]
        return GgmlTensor(self.type, (data.shape[0], *self.shape[1:]), data)

    def to(self, device: torch.device | str) -> "GgmlTensor":
        return GgmlTensor(self.type, self.shape, self.data.to(device))
