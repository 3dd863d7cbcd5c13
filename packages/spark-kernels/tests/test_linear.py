import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.linear import create_embedding, create_linear
from spark_kernels.testing import assert_close


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 63])
def test_linear_dense_rows_of_all_parts(num_tokens: int, has_bias: bool) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(rows, 96) * 96**-0.5 for rows in (64, 32, 17)]
    bias = torch.randn(113) if has_bias else None
    layer = create_linear(parts, dtype=torch.float32, device="cpu", bias=bias)
    x = torch.randn(num_tokens, 96)
    wanted = x.double() @ torch.cat(parts).double().T + (bias.double() if bias is not None else 0)
    assert (layer.in_features, layer.out_features) == (96, 113)
    assert_close(layer(x), wanted.float())


def test_create_linear_wrong_shapes() -> None:
    with pytest.raises(UnsupportedShapeError, match="of one K"):
        create_linear([torch.ones(2, 3), torch.ones(2, 4)], dtype=torch.float32, device="cpu")
    with pytest.raises(UnsupportedShapeError, match="of one K"):
        create_linear([], dtype=torch.float32, device="cpu")
    with pytest.raises(UnsupportedShapeError, match="bias"):
        create_linear([torch.ones(2, 3)], dtype=torch.float32, device="cpu", bias=torch.ones(3))


def test_embedding_dense() -> None:
    torch.manual_seed(1)
    weight = torch.randn(50, 24).bfloat16()
    table = create_embedding(weight, dtype=torch.float32, device="cpu")
    assert (table.num_rows, table.row_size) == (50, 24)
    rows = table(torch.tensor([3, 49, 3]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, weight[[3, 49, 3]].float())
    with pytest.raises(UnsupportedShapeError, match="create_embedding"):
        create_embedding(torch.ones(3), dtype=torch.float32, device="cpu")
