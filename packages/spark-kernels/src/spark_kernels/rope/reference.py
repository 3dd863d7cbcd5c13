"""Rotary position embedding in plain torch: the definition, on any device."""

import torch
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension i against dimension i + R/2, R = 2 * cos.shape[-1], in fp32; dimensions from R on pass through."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1)
