"""Skips gpu tests where there is no CUDA device; nothing else."""

import pytest


def has_cuda_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda_device():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
