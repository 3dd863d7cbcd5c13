"""The CPU's 16-bit and 4-bit layers against the dequantised weights in fp64."""

import numpy as np
import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml import GgmlTensor, GgmlType
from spark_kernels.linear import create_embedding, create_linear
from spark_kernels.linear.config import INT4_MAX_TOKENS, choose_linear
from spark_kernels.linear.half import HalfLinear, choose_packed_columns
from spark_kernels.linear.int4 import Int4Linear
from spark_kernels.testing import assert_close

CPU = torch.device("cpu")
# Largest error over the largest result: fp16 weights round at 2**-11; bf16 scales and activations at 2**-8 each.
HALF_NOISE, INT4_NOISE = 1e-3, 1e-2

needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this processor's torch has no FBGEMM"
)


def blocks(type: GgmlType, rows: int, columns: int, seed: int = 1) -> GgmlTensor:
    """Random blocks whose f16 scales are of order 0.01."""
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows * columns // type.block_size, type.type_size), dtype=np.uint8)
    num_halves = 2 if type is GgmlType.Q4_1 else 1
    scales = generator.uniform(0.005, 0.02, (len(data), num_halves)) * [1.0, -7.5][:num_halves]
    data[:, : 2 * num_halves] = scales.astype(np.float16).view(np.uint8)
    return GgmlTensor(type, (rows, columns), torch.from_numpy(data).view(rows, -1))


def noise(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    wanted = x.double() @ weight.double().T
    if bias is not None:
        wanted = wanted + bias.double()
    return ((result.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("type", [GgmlType.Q4_0, GgmlType.Q4_1], ids=lambda t: t.name)
@pytest.mark.parametrize("num_tokens", [1, 3, INT4_MAX_TOKENS, INT4_MAX_TOKENS + 1, 63])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_int4_is_the_dequantised_product(type: GgmlType, num_tokens: int, has_bias: bool) -> None:
    torch.manual_seed(1)
    parts = [blocks(type, 64, 96), blocks(type, 16, 96, seed=2), blocks(type, 48, 96, seed=3)]
    bias = torch.randn(128) if has_bias else None
    layer = create_linear(parts, dtype=torch.bfloat16, device="cpu", bias=bias)
    assert isinstance(layer, Int4Linear)
    assert (layer.in_features, layer.out_features) == (96, 128)
    x = torch.randn(num_tokens, 96)
    result = layer(x)
    is_few = num_tokens <= INT4_MAX_TOKENS
    assert result.dtype == (torch.bfloat16 if is_few else torch.float32)
    limit = INT4_NOISE if is_few else HALF_NOISE
    assert noise(result, x, torch.cat([part.dequantize() for part in parts]), bias) < limit
    narrow = layer(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert noise(narrow, x, torch.cat([part.dequantize() for part in parts]), bias) < 2 * INT4_NOISE


def test_linear_int4_row_is_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(1)
    layer = Int4Linear([blocks(GgmlType.Q4_1, 192, 576)], bias=None)
    x = torch.randn(INT4_MAX_TOKENS, 576)
    alone = torch.cat([layer(row[None]) for row in x])
    for size in range(1, INT4_MAX_TOKENS + 1):
        assert torch.equal(layer(x[:size]), alone[:size]), size


@needs_fbgemm
def test_linear_half_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(1)
    layer = HalfLinear([blocks(GgmlType.Q4_1, 192, 576)], bias=None)
    x = torch.randn(40, 576)
    alone = torch.cat([layer(row[None]) for row in x])
    for size in range(1, 41):
        assert_close(layer(x[:size]), alone[:size])


@needs_fbgemm
@pytest.mark.parametrize(("columns", "packed"), [(64, 64), (512, 512), (576, 512), (800, 800), (1056, 1024)])
def test_linear_half_tail_of_columns(columns: int, packed: int) -> None:
    torch.manual_seed(1)
    assert choose_packed_columns(columns) == packed
    weight, bias, x = torch.randn(33, columns), torch.randn(33), torch.randn(5, columns)
    assert noise(HalfLinear([weight], bias=bias)(x), x, weight, bias) < HALF_NOISE


@needs_fbgemm
def test_linear_half_takes_dense_and_block_parts() -> None:
    torch.manual_seed(1)
    first, second = torch.randn(20, 64).bfloat16() * 0.1, blocks(GgmlType.Q8_0, 33, 64)
    parts: list[torch.Tensor | GgmlTensor] = [first, second]
    layer = create_linear(parts, dtype=torch.bfloat16, device="cpu", bias=torch.randn(53))
    assert isinstance(layer, HalfLinear)
    dense = torch.cat([first.float(), second.dequantize()])
    layer = create_linear(parts, dtype=torch.bfloat16, device="cpu")
    for num_tokens in (0, 1, 17):
        x = torch.randn(num_tokens, 64)
        assert layer(x).shape == (num_tokens, 53)
        if num_tokens:
            assert noise(layer(x), x, dense) < HALF_NOISE


@needs_fbgemm
def test_linear_half_refuses_what_fp16_cannot_hold() -> None:
    with pytest.raises(UnsupportedShapeError, match="70000.*float32"):
        HalfLinear([torch.full((2, 32), 70000.0)], bias=None)


@pytest.mark.parametrize(
    ("parts", "dtype", "device", "engines", "kind"),
    [
        ([blocks(GgmlType.Q4_1, 16, 32)], torch.bfloat16, "cpu", ["fbgemm"], "int4"),
        ([blocks(GgmlType.Q4_1, 16, 32)], torch.float32, "cpu", ["fbgemm"], "dense"),
        ([blocks(GgmlType.Q4_1, 16, 32)], torch.bfloat16, "cuda", ["fbgemm"], "dense"),
        ([blocks(GgmlType.Q4_1, 16, 32)], torch.bfloat16, "cpu", ["qnnpack"], "int4"),
        ([blocks(GgmlType.Q4_1, 24, 32)], torch.bfloat16, "cpu", ["fbgemm"], "half"),
        ([blocks(GgmlType.Q4_1, 16, 32), blocks(GgmlType.Q8_0, 16, 32)], torch.bfloat16, "cpu", ["fbgemm"], "half"),
        ([torch.ones(16, 32)], torch.bfloat16, "cpu", ["qnnpack"], "dense"),
        ([torch.ones(16, 32)], torch.float16, "cpu", ["fbgemm"], "half"),
    ],
)
def test_choose_linear(
    parts: list[torch.Tensor | GgmlTensor], dtype: torch.dtype, device: str, engines: list[str], kind: str
) -> None:
    choice = choose_linear(parts, dtype=dtype, device=torch.device(device), engines=engines)
    assert choice.kind == kind and choice.reason


def test_linear_int4_layers_share_memory_without_harm() -> None:
    torch.manual_seed(1)
    shapes = [(16, 32), (64, 96), (32, 64)]
    stored = [blocks(GgmlType.Q4_1, *shape, seed=i) for i, shape in enumerate(shapes)]
    layers = [Int4Linear([part], bias=None) for part in stored]
    for _ in range(2):
        for part, layer in zip(stored, layers, strict=True):
            x = torch.randn(40, layer.in_features)
            assert noise(layer(x), x, part.dequantize()) < HALF_NOISE


def test_linear_float32_computes_block_weights_exactly() -> None:
    torch.manual_seed(1)
    part = blocks(GgmlType.Q4_1, 48, 96)
    layer = create_linear([part], dtype=torch.float32, device="cpu")
    for num_tokens in (1, 8, 40):
        x = torch.randn(num_tokens, 96)
        assert noise(layer(x), x, part.dequantize()) < 1e-6


def test_embedding_of_blocks() -> None:
    part = blocks(GgmlType.Q8_0, 40, 64)
    table = create_embedding(part, dtype=torch.float32, device="cpu")
    ids = torch.tensor([7, 0, 39, 7])
    assert torch.equal(table(ids), part.dequantize()[ids])
    assert create_embedding(part, dtype=torch.bfloat16, device="cpu")(ids).dtype == torch.bfloat16
