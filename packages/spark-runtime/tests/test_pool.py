"""The KV pool's shapes, sizes and refusals."""

import pytest
import torch

from spark_runtime.errors import OutOfMemoryError
from spark_runtime.kvcache.pool import KvPool, KvShape, bytes_per_block

SHAPES = [KvShape(2, 16), KvShape(1, 32), KvShape(2, 16)]


def test_create_gives_each_layer_its_shape() -> None:
    pool = KvPool.create(SHAPES, num_blocks=5, block_size=4, dtype=torch.bfloat16, device="cpu")
    assert len(pool) == 3
    assert pool.num_blocks == 5
    assert [tuple(cache.keys.shape) for cache in pool] == [(5, 4, 2, 16), (5, 4, 1, 32), (5, 4, 2, 16)]
    assert all(cache.keys.shape == cache.values.shape for cache in pool)
    assert pool[1].values.dtype == torch.bfloat16


def test_create_starts_with_zeros_and_no_shared_memory() -> None:
    pool = KvPool.create(SHAPES, num_blocks=2, block_size=4, dtype=torch.float32, device="cpu")
    pool[0].keys.fill_(1.0)
    others = [pool[0].values, *(tensor for cache in pool[1:] for tensor in cache)]
    assert all(not tensor.any() for tensor in others)


def test_num_bytes_is_what_bytes_per_block_says() -> None:
    pool = KvPool.create(SHAPES, num_blocks=5, block_size=4, dtype=torch.bfloat16, device="cpu")
    assert bytes_per_block(SHAPES, 4, torch.bfloat16) == 3 * 2 * 4 * 32 * 2
    assert pool.num_bytes == 5 * bytes_per_block(SHAPES, 4, torch.bfloat16)


def test_create_that_the_device_refuses_names_the_options() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1099511627776 blocks.*\n.*--gpu-memory-utilization"):
        KvPool.create(SHAPES, num_blocks=1 << 40, block_size=16, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_create_refuses_an_empty_pool(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KvPool.create(SHAPES, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device="cpu")
