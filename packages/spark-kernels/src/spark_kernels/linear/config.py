"""Which implementation a linear layer gets. Chosen once, when the layer is made; the choice and its reason can be shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor, GgmlType

LinearKind = Literal["dense", "half", "int4"]

# Block types that are exactly "4-bit number times scale plus zero point" in groups of 32.
INT4_TYPES = frozenset({GgmlType.Q4_0, GgmlType.Q4_1})
# torch's packed int4 layout: whole output tiles of 16 rows.
INT4_ROW_MULTIPLE = 16
# Rows of x up to which the int4 kernel beats widening the weights and an fp32 product (Ice Lake, 106 M weights, one thread,
# milliseconds): 16 rows 52 against 87, 32 rows 99 against 102, 64 rows 195 against 132.
INT4_MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """The implementation of a layer and why."""

    kind: LinearKind
    reason: str


def choose_linear(
    parts: Sequence[Tensor | GgmlTensor], *, dtype: torch.dtype, device: torch.device, engines: Sequence[str]
) -> LinearChoice:
    """Pick the implementation for a weight of these parts.

    engines   torch.backends.quantized.supported_engines: "fbgemm" has the fp16 matrix product
    """
    if device.type != "cpu" or dtype == torch.float32:
        return LinearChoice("dense", f"{dtype} on {device.type} is computed as it is")
    rows_fit = all(part.shape[0] % INT4_ROW_MULTIPLE == 0 for part in parts)
    if rows_fit and all(isinstance(part, GgmlTensor) and part.type in INT4_TYPES for part in parts):
        return LinearChoice("int4", "4-bit blocks: a third of fp16's time up to 2 tokens, half at 4")
    if "fbgemm" not in engines:
        return LinearChoice("dense", "torch has no FBGEMM on this processor")
    return LinearChoice("half", "fp16 weights, fp32 sums: half the bytes of fp32, three times bf16's speed at 8 tokens")
