"""The process's own memory, as the plan measures it."""

import numpy as np

from spark_runtime.device_memory import allocated_bytes


def test_allocated_bytes_counts_touched_pages() -> None:
    before = allocated_bytes("cpu")
    held = np.ones(64 * 1024 * 1024, dtype=np.uint8)
    growth = allocated_bytes("cpu") - before
    assert 0.9 * held.nbytes < growth < 1.5 * held.nbytes
