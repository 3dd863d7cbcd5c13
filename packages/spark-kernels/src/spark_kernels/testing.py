"""Helpers of the ops' tests: comparison with one tolerance table, and memory that shows when it was not written."""

import torch
from torch import Tensor

# (relative, absolute) per dtype: a few units in the last place of sums over some thousand products of order 1.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Compare with the tolerance of `dtype` (default: that of `actual`). Shapes must agree; NaN equals nothing."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    relative, absolute = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=relative, atol=absolute, equal_nan=False, check_device=False
    )


def nan_filled(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A tensor of NaN: what an op leaves unwritten, or reads without being allowed to, shows in the result."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
