import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.silu_mul import silu_mul
from spark_kernels.testing import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 63])
def test_silu_mul_equals_definition(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate_up = (torch.randn(rows, 2 * 257) * 3).to(dtype)
    gate, up = gate_up[:, :257].double(), gate_up[:, 257:].double()
    result = silu_mul(gate_up)
    assert result.dtype == dtype
    assert_close(result, (gate / (1 + torch.exp(-gate)) * up).float(), dtype=dtype)


def test_silu_mul_odd_size() -> None:
    with pytest.raises(UnsupportedShapeError, match="last dimension is 5"):
        silu_mul(torch.ones(1, 5))
