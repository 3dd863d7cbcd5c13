"""Block types against the gguf package: random bytes with finite scales, difference exactly 0 in fp32."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.ggml import GgmlTensor, GgmlType
from spark_kernels.ggml.reference import CHUNK_WEIGHTS, DEQUANTIZERS
from spark_kernels.ggml.types import TYPES_BY_ID, UNREAD_TYPES

# Byte offsets of the f16 numbers in a block: random bytes there could be inf or nan.
HALF_OFFSETS: dict[GgmlType, tuple[int, ...]] = {
    GgmlType.F16: (0,),
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ4_NL: (0,),
}


def random_blocks(type: GgmlType, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, type_size]: every byte random, every scale finite."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, type.type_size), dtype=np.uint8)
    if type in (GgmlType.F32, GgmlType.BF16):
        stored = random.standard_normal((count, 1)).astype(np.float32).view(np.uint8)
        return np.ascontiguousarray(stored[:, -type.type_size :])
    if type is GgmlType.MXFP4:
        blocks[:, 0] %= 250  # 2 ** 123 times 6 is still finite
    for offset in HALF_OFFSETS.get(type, ()):
        halves = random.standard_normal((count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return blocks


def expected_values(type: GgmlType, blocks: np.ndarray) -> np.ndarray:
    values: np.ndarray = gguf.dequantize(blocks, gguf.GGMLQuantizationType(type.id))
    return values.reshape(len(blocks), type.block_size)


def bits(values: torch.Tensor) -> torch.Tensor:
    """fp32 as its bit patterns, so that equality also tells -0 from 0 and compares nan."""
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("type", list(GgmlType), ids=lambda type: str(type.name))
@pytest.mark.parametrize("count", [0, 1, 63, 257])
def test_dequantize_equals_gguf(type: GgmlType, count: int) -> None:
    blocks = random_blocks(type, count, seed=count)
    tensor = GgmlTensor(type, (count, type.block_size), torch.from_numpy(blocks))
    got = tensor.dequantize()
    assert got.dtype == torch.float32 and got.shape == (count, type.block_size)
    if count == 0:
        return
    wanted = torch.from_numpy(expected_values(type, blocks).copy())
    assert (got - wanted).abs().max().item() == 0.0
    assert got.abs().max() > 0


def test_dequantize_covers_every_type() -> None:
    assert set(DEQUANTIZERS) == set(GgmlType)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 127, 253, 254])
def test_dequantize_mxfp4_extreme_exponents(exponent: int) -> None:
    blocks = random_blocks(GgmlType.MXFP4, 8)
    blocks[:, 0] = exponent
    got = GgmlTensor(GgmlType.MXFP4, (8, 32), torch.from_numpy(blocks)).dequantize()
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(expected_values(GgmlType.MXFP4, blocks).copy())
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("type", [GgmlType.Q4_1, GgmlType.Q6_K, GgmlType.F16], ids=lambda type: str(type.name))
def test_dequantize_crosses_chunks(type: GgmlType) -> None:
    count = CHUNK_WEIGHTS // type.block_size + 3
    blocks = random_blocks(type, count)
    got = GgmlTensor(type, (count, type.block_size), torch.from_numpy(blocks)).dequantize()
    assert torch.equal(bits(got), bits(torch.from_numpy(expected_values(type, blocks).copy())))


@pytest.mark.parametrize("type", [GgmlType.Q4_0, GgmlType.Q4_K, GgmlType.MXFP4], ids=lambda type: str(type.name))
def test_dequantize_experts(type: GgmlType) -> None:
    experts, rows, row_blocks = 3, 5, 2
    blocks = random_blocks(type, experts * rows * row_blocks)
    columns = row_blocks * type.block_size
    data = torch.from_numpy(blocks).view(experts, rows, row_blocks * type.type_size)
    tensor = GgmlTensor(type, (experts, rows, columns), data)
    wanted = torch.from_numpy(expected_values(type, blocks).copy()).view(experts, rows, columns)
    assert torch.equal(tensor.dequantize(), wanted)
    chosen = tensor.select_rows(torch.tensor([2, 0]))
    assert chosen.shape == (2, rows, columns)
    assert torch.equal(chosen.dequantize(), wanted[[2, 0]])


def test_dequantize_rounds_to_the_asked_dtype() -> None:
    blocks = torch.from_numpy(random_blocks(GgmlType.Q5_K, 4))
    tensor = GgmlTensor(GgmlType.Q5_K, (4, 256), blocks)
    assert torch.equal(tensor.dequantize(torch.bfloat16), tensor.dequantize().bfloat16())


def test_dequantize_one_dimension() -> None:
    blocks = torch.from_numpy(random_blocks(GgmlType.F32, 7)).flatten()
    assert GgmlTensor(GgmlType.F32, (7,), blocks).dequantize().shape == (7,)


def test_select_rows_permutes_and_slices() -> None:
    blocks = torch.from_numpy(random_blocks(GgmlType.Q8_0, 12)).view(6, 68)
    tensor = GgmlTensor(GgmlType.Q8_0, (6, 64), blocks)
    order = torch.tensor([5, 0, 3, 3])
    assert torch.equal(tensor.select_rows(order).dequantize(), tensor.dequantize()[order])
    part = tensor.select_rows(slice(2, 5))
    assert torch.equal(part.dequantize(), tensor.dequantize()[2:5])
    assert part.data.data_ptr() == blocks[2].data_ptr()


def test_tensor_refuses_data_that_does_not_fit() -> None:
    with pytest.raises(UnsupportedShapeError, match=r"Q8_0 \[2, 32\]: data is torch.uint8 \[2, 33\]"):
        GgmlTensor(GgmlType.Q8_0, (2, 32), torch.zeros(2, 33, dtype=torch.uint8))
    with pytest.raises(UnsupportedShapeError, match="48 is not a multiple of the block size 32"):
        GgmlTensor(GgmlType.Q8_0, (2, 48), torch.zeros(2, 51, dtype=torch.uint8))
    with pytest.raises(UnsupportedShapeError, match="no rows to select"):
        GgmlTensor(GgmlType.F32, (1,), torch.zeros(4, dtype=torch.uint8)).select_rows(slice(0, 1))


def test_types_agree_with_gguf() -> None:
    for entry in GgmlType:
        known = gguf.GGMLQuantizationType(entry.id)
        assert known.name == entry.name
        assert gguf.GGML_QUANT_SIZES[known] == (entry.block_size, entry.type_size)
    names = {known.value: known.name for known in gguf.GGMLQuantizationType}
    assert {id: names.get(id) for id in UNREAD_TYPES if id in names} == {
        id: name for id, name in UNREAD_TYPES.items() if id in names
    }
    assert set(names) <= set(UNREAD_TYPES) | set(TYPES_BY_ID)


def test_types_import_no_torch() -> None:
    code = "import sys, spark_kernels.ggml, spark_kernels.ggml.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
