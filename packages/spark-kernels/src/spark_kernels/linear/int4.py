"""Linear layers over 4-bit weights on the CPU: torch's packed int4 kernel for few tokens, fp32 products for many."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor, GgmlType
from spark_kernels.linear.config import INT4_MAX_TOKENS

GROUP_SIZE = 32


class Int4Linear:
    """Weights twice: 4-bit for a decode step, fp16 for a prefill, which widens them to fp32 again when it runs.

    The int4 kernel takes x, scales and zero points in bf16, sums in fp32 and rounds to bf16: its noise is that of bf16.
    A row's bits do not depend on the other rows.
    """

    def __init__(self, parts: Sequence[GgmlTensor], *, bias: Tensor | None) -> None:
        self.in_features: int = parts[0].shape[1]
        self.out_features: int = sum(part.shape[0] for part in parts)
        numbers, scales = zip(*(int4_groups(part) for part in parts), strict=True)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.cat(numbers), 1)
        self._scales = torch.cat(scales, dim=1)
        self._half = torch.empty(self.in_features, self.out_features, dtype=torch.float16)
        start = 0
        for part in parts:
            self._half[:, start : start + part.shape[0]] = part.dequantize(torch.float16).T
            start += part.shape[0]
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT4_MAX_TOKENS:
            result = torch.mm(x.float(), _widened(self._half)).to(x.dtype)
        else:
            # torch.ops.aten's spelling of the same call takes 3 µs more
            result = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self._packed, GROUP_SIZE, self._scales)
        return result if self._bias is None else result.add_(self._bias)


class _Scratch(threading.local):
    """Memory for one layer's weights in fp32, of the largest layer that this thread ran."""

    memory = torch.empty(0)


_scratch = _Scratch()


def _widened(weight: Tensor) -> Tensor:
    """The weight in fp32, in memory that the next call overwrites."""
    if _scratch.memory.numel() < weight.numel():
        _scratch.memory = torch.empty(weight.numel())
    return _scratch.memory[: weight.numel()].view(weight.shape).copy_(weight)


def int4_groups(part: GgmlTensor) -> tuple[Tensor, Tensor]:
    """(numbers 0 .. 15 int32 [N, K], scale and zero point bf16 [K / 32, N, 2]); weight = (number - 8) * scale + zero."""
    rows, columns = part.shape
    blocks = part.data.reshape(-1, part.type.type_size)
    nibbles = blocks[:, -16:]
    numbers = torch.empty(blocks.shape[0], GROUP_SIZE, dtype=torch.int32, device=blocks.device)
    numbers[:, :16] = nibbles & 15
    numbers[:, 16:] = nibbles >> 4
    scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [N * K / 32, 1]
    if part.type is GgmlType.Q4_1:
        zero = blocks[:, 2:4].contiguous().view(torch.float16).float() + 8 * scale
    else:
        zero = torch.zeros_like(scale)
    pairs = torch.cat((scale, zero), dim=1).view(rows, columns // GROUP_SIZE, 2)
    return numbers.view(rows, columns), pairs.transpose(0, 1).to(torch.bfloat16).contiguous()
