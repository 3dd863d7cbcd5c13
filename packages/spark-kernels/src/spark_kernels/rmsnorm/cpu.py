"""RMSNorm on the CPU in fp32 with fewer and cheaper kernels than the definition has."""

from functools import cache

import torch
from torch import Tensor


@cache
def _number(value: float) -> Tensor:
    return torch.tensor([value])


def rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x²) + eps) is hypot(norm(x), sqrt(K eps)) / sqrt(K): one reduction, three numbers a row, two sweeps."""
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(_number((size * eps) ** 0.5))
    return torch.mul(x, length.reciprocal_().mul_(size**0.5)).mul_(weight)
