"""GGUF block types in plain torch: bytes in, fp32 out. Any device; the definition that device kernels are checked against.

A dequantiser takes blocks [n, type_size] uint8 and gives [n, block_size] fp32. Products are formed in the order in which
llama.cpp's reference forms them (scale times sub-scale first), so the results agree bit for bit.
In 32-weight blocks the low nibble of byte j is weight j and the high nibble weight j + 16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spark_kernels.ggml.types import GgmlType

# Weights handled at once: the temporaries of a chunk then stay in the last-level cache and the peak memory bounded.
CHUNK_WEIGHTS = 1 << 19

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# E2M1 doubled: whole numbers, paired with half the block's scale.
MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize_blocks(type: GgmlType, blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n, type_size] uint8 to [n, block_size] of `dtype`, on the device of `blocks`. n may be 0."""
    num_blocks = blocks.shape[0]
    out = torch.empty(num_blocks, type.block_size, dtype=dtype, device=blocks.device)
    step = CHUNK_WEIGHTS // type.block_size
    dequantizer = DEQUANTIZERS[type]
    for start in range(0, num_blocks, step):
        out[start : start + step] = dequantizer(blocks[start : start + step])
    return out


def _dense(stored: torch.dtype) -> Callable[[Tensor], Tensor]:
    def dequantize(blocks: Tensor) -> Tensor:
        return blocks.contiguous().view(stored).float()

    return dequantize


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The f16 at byte `offset` of each block, as fp32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _shifts(step: int, count: int, device: torch.device) -> Tensor:
    """[count, 1] uint8: 0, step, 2 * step, ..."""
    return torch.arange(0, step * count, step, dtype=torch.uint8, device=device).unsqueeze(1)


def _nibbles(packed: Tensor) -> Tensor:
    """[n, 16] bytes to fp32 [n, 32]."""
    values = torch.empty(packed.shape[0], 32, dtype=torch.float32, device=packed.device)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _fifth_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes, a little-endian u32 whose bit i belongs to weight i, to uint8 [n, 32] of 0 or 16."""
    bits = packed.unsqueeze(2) >> _shifts(1, 8, packed.device).flatten()
    return ((bits & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _codebook(packed: Tensor, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    return table[torch.cat([packed & 15, packed >> 4], dim=1).int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _codebook(blocks[:, 2:], IQ4_NL_VALUES).mul_(_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # 2 ** (exponent - 128) by its bits: subnormal below 2, where the exponent field cannot go lower
    subnormal = torch.where(exponent == 0, 1 << 21, 1 << 22).int()
    half_scale = torch.where(exponent < 2, subnormal, (exponent - 1) << 23).view(torch.float32)
    return _codebook(blocks[:, 1:], MXFP4_DOUBLED).mul_(half_scale)


def _two_bit_planes(packed: Tensor) -> Tensor:
    """[n, 64] bytes to uint8 [n, 2, 4, 32]: half, plane, byte within the half."""
    return (packed.view(-1, 2, 1, 32) >> _shifts(2, 4, packed.device)) & 3


def _q2_k(blocks: Tensor) -> Tensor:
    scales, packed = blocks[:, :16], blocks[:, 16:80].contiguous()
    scale = (scales & 15).float().mul_(_half(blocks, 80)).unsqueeze(2)  # [n, 16, 1]
    minimum = (scales >> 4).float().mul_(_half(blocks, 82)).unsqueeze(2)
    return _two_bit_planes(packed).view(-1, 16, 16).float().mul_(scale).sub_(minimum).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    high_mask, packed, scales = blocks[:, :32], blocks[:, 32:96].contiguous(), blocks[:, 96:108]
    low = torch.cat([scales[:, :8] & 15, scales[:, :8] >> 4], dim=1)  # [n, 16]
    high = ((scales[:, None, 8:] >> _shifts(2, 4, blocks.device)) & 3).flatten(1)
    scale = (low | (high << 4)).float().sub_(32).mul_(_half(blocks, 108)).unsqueeze(2)
    third_bit = ((high_mask.unsqueeze(1) >> _shifts(1, 8, blocks.device)) & 1) << 2  # [n, 8, 32]
    values = _two_bit_planes(packed).view(-1, 8, 32) | third_bit
    return values.view(-1, 16, 16).float().sub_(4).mul_(scale).flatten(1)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of 6-bit scales and minimums of Q4_K and Q5_K, as fp32 [n, 8] each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minimum = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scale.float(), minimum.float()


def _scaled_and_shifted(blocks: Tensor, values: Tensor) -> Tensor:
    """Q4_K and Q5_K: `values` [n, 8, 32] uint8 times d * scale less dmin * minimum."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    scale = scale.mul_(_half(blocks, 0)).unsqueeze(2)
    minimum = minimum.mul_(_half(blocks, 2)).unsqueeze(2)
    return values.float().mul_(scale).sub_(minimum).flatten(1)


def _nibble_planes(packed: Tensor) -> Tensor:
    """[n, 128] bytes to uint8 [n, 8, 32]: the low, then the high nibbles of each 32 bytes."""
    return ((packed.view(-1, 4, 1, 32) >> _shifts(4, 2, packed.device)) & 15).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_and_shifted(blocks, _nibble_planes(blocks[:, 16:].contiguous()))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = ((blocks[:, None, 16:48] >> _shifts(1, 8, blocks.device)) & 1) << 4  # [n, 8, 32]
    return _scaled_and_shifted(blocks, _nibble_planes(blocks[:, 48:].contiguous()) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].contiguous().view(-1, 2, 1, 64)
    low = ((low >> _shifts(4, 2, blocks.device)) & 15).view(-1, 2, 4, 32)
    high = _two_bit_planes(blocks[:, 128:192].contiguous()) << 4
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208)).unsqueeze(2)
    return (low | high).view(-1, 16, 16).float().sub_(32).mul_(scale).flatten(1)


DEQUANTIZERS: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.F32: _dense(torch.float32),
    GgmlType.F16: _dense(torch.float16),
    GgmlType.BF16: _dense(torch.bfloat16),
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
    GgmlType.IQ4_NL: _iq4_nl,
    GgmlType.MXFP4: _mxfp4,
}
