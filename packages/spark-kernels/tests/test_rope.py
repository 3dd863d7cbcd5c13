import math

import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.rope import apply_rope, widen_tables
from spark_kernels.testing import assert_close


def tables(positions: list[int], rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.tensor([[p * 10000 ** (-2 * i / rotary) for i in range(rotary // 2)] for p in positions])
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "rotary"), [(1, 64), (7, 64), (7, 32), (0, 64)])
def test_apply_rope_turns_pairs_and_passes_the_rest(num_tokens: int, rotary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(num_tokens, 6, 64).to(dtype), torch.randn(num_tokens, 2, 64).to(dtype)
    positions = list(range(3, 3 + num_tokens))
    cos, sin = tables(positions, rotary) if num_tokens else (torch.empty(0, rotary // 2), torch.empty(0, rotary // 2))
    for source, turned in zip((q, k), apply_rope(q, k, cos, sin), strict=True):
        assert turned.dtype == dtype
        half = rotary // 2
        wanted = source.double().clone()
        for token, position in enumerate(positions):
            for i in range(half):
                angle = position * 10000 ** (-2 * i / rotary)
                a, b = source[token, :, i].double(), source[token, :, i + half].double()
                wanted[token, :, i] = a * math.cos(angle) - b * math.sin(angle)
                wanted[token, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
        assert_close(turned, wanted.float(), dtype=dtype)


def test_apply_rope_takes_views_of_a_fused_projection() -> None:
    torch.manual_seed(1)
    qkv = torch.randn(5, 5 * 64)
    q, k = qkv[:, : 3 * 64], qkv[:, 3 * 64 : 4 * 64]
    cos, sin = tables(list(range(5)), 64)
    apart = apply_rope(q.reshape(5, 3, 64).clone(), k.reshape(5, 1, 64).clone(), cos, sin)
    before = qkv.clone()
    fused = apply_rope(q.view(5, 3, 64), k.view(5, 1, 64), cos, sin)
    assert torch.equal(apart[0], fused[0]) and torch.equal(apart[1], fused[1])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotary", [64, 32])
def test_apply_rope_wide_tables_give_the_same(rotary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(5, 3, 64).to(dtype), torch.randn(5, 1, 64).to(dtype)
    cos, sin = tables(list(range(5)), rotary)
    for narrow, wide in zip(apply_rope(q, k, cos, sin), apply_rope(q, k, *widen_tables(cos, sin)), strict=True):
        assert torch.equal(narrow, wide)


def test_apply_rope_wrong_shapes() -> None:
    cos, sin = tables([0, 1], 64)
    with pytest.raises(UnsupportedShapeError, match="apply_rope"):
        apply_rope(torch.ones(3, 2, 64), torch.ones(3, 1, 64), cos, sin)
    with pytest.raises(UnsupportedShapeError, match="R <= D"):
        apply_rope(torch.ones(2, 2, 32), torch.ones(2, 1, 32), cos, sin)
