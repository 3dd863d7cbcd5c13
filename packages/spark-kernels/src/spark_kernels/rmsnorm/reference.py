"""RMSNorm in plain torch: the definition, on any device."""

import torch
from torch import Tensor


def rmsnorm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) in fp32, rounded to x.dtype, then times weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)
