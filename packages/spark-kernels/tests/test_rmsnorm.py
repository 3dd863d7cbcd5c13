import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rmsnorm import add_rmsnorm, rmsnorm
from spark_kernels.testing import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 63), (63, 257), (3, 5, 64)], ids=str)
def test_rmsnorm_equals_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(shape).to(dtype) * 3, torch.randn(shape[-1])
    result = rmsnorm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_close(result, expected(x, weight, 1e-5).float(), dtype=dtype)


def test_rmsnorm_eps_inside_the_root() -> None:
    x = torch.full((1, 64), 1e-3)
    assert_close(rmsnorm(x, torch.ones(64), 1e-5), expected(x, torch.ones(64), 1e-5).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rmsnorm_gives_sum_and_norm_and_leaves_its_arguments(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.randn(96)
    before = x.clone(), residual.clone()
    normed, total = add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(total, before[0] + before[1])
    assert_close(normed, expected(total, weight, 1e-6).float(), dtype=dtype)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rmsnorm_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(8, 576), torch.randn(576)
    together = rmsnorm(x, weight, 1e-5)
    assert all(torch.equal(together[i : i + 1], rmsnorm(x[i : i + 1], weight, 1e-5)) for i in range(8))


def test_rmsnorm_wrong_shapes() -> None:
    with pytest.raises(UnsupportedShapeError, match=r"weight is \(8,\), x is \(2, 9\)"):
        rmsnorm(torch.ones(2, 9), torch.ones(8), 1e-5)
    with pytest.raises(UnsupportedShapeError, match="residual"):
        add_rmsnorm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5)
