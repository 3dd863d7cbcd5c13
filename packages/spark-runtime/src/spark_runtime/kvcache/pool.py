"""Memory of the paged KV cache: two tensors per layer, divided into fixed blocks of tokens."""

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from spark_runtime.errors import OutOfMemoryError


class KvShape(NamedTuple):
    """What one layer stores per token: num_kv_heads keys and as many values, of head_dim elements each."""

    num_kv_heads: int
    head_dim: int


class KvCache(NamedTuple):
    """One layer's share of the pool; keys and values [num_blocks, block_size, KH, D]."""

    keys: Tensor
    values: Tensor


class KvPool(Sequence[KvCache]):
    """All layers' caches; item i is layer i's. Block b of a sequence is block b in every layer."""

    def __init__(self, caches: Sequence[KvCache], block_size: int) -> None:
        self._caches = tuple(caches)
        self.block_size = block_size

    @classmethod
    def create(
        cls,
        shapes: Sequence[KvShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KvPool":
        """Allocate the pool, zeroed: a block that was never written holds no NaN. On the CPU it takes memory as it fills.

        Raises OutOfMemoryError if the device refuses, ValueError if num_blocks or block_size is below 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"KV pool of {num_blocks} blocks of {block_size} tokens: both must be at least 1")
        try:
            caches = [
                KvCache(
                    _zeros((num_blocks, block_size, *shape), dtype, torch.device(device)),
                    _zeros((num_blocks, block_size, *shape), dtype, torch.device(device)),
                )
                for shape in shapes
            ]
        except (
            RuntimeError,
            OSError,
            OverflowError,
        ) as error:  # the CUDA allocator raises a RuntimeError, mmap the others
            wanted = num_blocks * bytes_per_block(shapes, block_size, dtype)
            raise OutOfMemoryError(
                f"kv pool: {device} has no room for {num_blocks} blocks of {block_size} tokens ({wanted:,} bytes)\n"
                "  hint: lower --gpu-memory-utilization or --max-seq-len"
            ) from error
        return cls(caches, block_size)

    @property
    def num_blocks(self) -> int:
        return self._caches[0].keys.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for cache in self._caches for tensor in cache)

    def __len__(self) -> int:
        return len(self._caches)

    def __iter__(self) -> Iterator[KvCache]:
        return iter(self._caches)

    @overload
    def __getitem__(self, index: int) -> KvCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KvCache]: ...
    def __getitem__(self, index: int | slice) -> KvCache | Sequence[KvCache]:
        return self._caches[index]


def bytes_per_block(shapes: Sequence[KvShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(2 * block_size * heads * head_dim for heads, head_dim in shapes) * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, except that CPU pages of an anonymous mapping exist from their first write on."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
