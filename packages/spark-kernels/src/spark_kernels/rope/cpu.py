"""Rotary position embedding on the CPU in fp32, whole heads: the halves change places by one roll."""

import torch
from torch import Tensor


def rotate_cpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rotate_reference` on q and k, for 2 * cos.shape[-1] == D and fp32."""
    half = cos.shape[-1]
    wide_cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)  # [T, 1, D]
    wide_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    return (
        (q * wide_cos).addcmul_(q.roll(half, -1), wide_sin),
        (k * wide_cos).addcmul_(k.roll(half, -1), wide_sin),
    )
