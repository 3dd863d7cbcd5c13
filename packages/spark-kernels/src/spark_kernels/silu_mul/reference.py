"""SwiGLU's activation in plain torch: the definition, on any device."""

import torch
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
