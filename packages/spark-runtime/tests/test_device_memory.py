"""The process's own memory, as the plan measures it."""

import mmap

import numpy as np

from spark_runtime.device_memory import allocated_bytes

NUM_BYTES = 64 * 1024 * 1024


def test_allocated_bytes_counts_touched_pages() -> None:
    before = allocated_bytes("cpu")
    # A mapping of its own: malloc may hand out pages that earlier tests touched.
    held = np.frombuffer(mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    mapped = allocated_bytes("cpu")
    held[:] = 1
    assert mapped - before < 0.1 * NUM_BYTES
    assert 0.9 * NUM_BYTES < allocated_bytes("cpu") - mapped < 1.5 * NUM_BYTES
