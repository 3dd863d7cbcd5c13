"""Weights in GGUF block types. `spark_kernels.ggml.types` alone imports no torch, nor does this package by itself."""

from typing import TYPE_CHECKING, Any

from spark_kernels.ggml.types import GgmlType

if TYPE_CHECKING:
    from spark_kernels.ggml.reference import dequantize_blocks
    from spark_kernels.ggml.tensor import GgmlTensor

__all__ = ["GgmlTensor", "GgmlType", "dequantize_blocks"]


def __getattr__(name: str) -> Any:  # PEP 562: the types are needed where torch is not
    if name == "GgmlTensor":
        from spark_kernels.ggml.tensor import GgmlTensor

        return GgmlTensor
    if name == "dequantize_blocks":
        from spark_kernels.ggml.reference import dequantize_blocks

        return dequantize_blocks
    raise AttributeError(f"module 'spark_kernels.ggml' has no attribute {name!r}")
