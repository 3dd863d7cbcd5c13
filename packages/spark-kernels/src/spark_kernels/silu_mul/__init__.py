"""SwiGLU's activation: silu(gate) * up, gate and up lying side by side."""

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.silu_mul.reference import silu_mul_reference

__all__ = ["silu_mul"]


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2I] (gate first, then up) to [..., I]. Raises UnsupportedShapeError if the last dimension is odd."""
    if gate_up.shape[-1] % 2:
        raise UnsupportedShapeError(f"silu_mul: last dimension is {gate_up.shape[-1]}; wanted gate and up of one size")
    return silu_mul_reference(gate_up)
