"""Weights from GGUF files, memory-mapped: dense tensors as they are, quantised ones in their blocks."""

from collections.abc import Sequence
from pathlib import Path

import torch
from spark_kernels.ggml import GgmlTensor
from torch import Tensor

from spark_model.gguf import GgufFile, TensorInfo
from spark_model.loaders.progress import Consumed, ProgressReport
from spark_model.loaders.source import missing_weight


class GgufSource:
    """A WeightSource over a GGUF checkpoint; shapes in torch's order ([out, in])."""

    def __init__(self, path: Path, report: ProgressReport | None) -> None:
        self._gguf = GgufFile(path)
        self.path = self._gguf.path
        self._names = tuple(self._gguf.tensors)
        self.consumed = Consumed(sum(info.size for info in self._gguf.tensors.values()), report)

    def _info(self, name: str) -> TensorInfo:
        info = self._gguf.tensors.get(name)
        if info is None:
            raise missing_weight(self, name)
        return info

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def file(self, name: str) -> Path:
        return self._info(name).path

    def tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        if not stored.type.is_dense:
            return stored.dequantize()
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored.type.name]
        return stored.data.view(dtype)

    def blocks(self, name: str) -> GgmlTensor | None:
        return None if self._info(name).type.is_dense else self._stored(name)

    def _stored(self, name: str) -> GgmlTensor:
        info = self._info(name)
        shape = (*info.shape[:-1], info.type.row_bytes(info.shape[-1]))
        data = torch.frombuffer(self._gguf.data(name), dtype=torch.uint8).view(shape)
        self.consumed.take(name, info.size)
        return GgmlTensor(info.type, info.shape, data)

    def close(self) -> None:
        self._gguf.close()
