"""Weights from safetensors files, single or sharded, memory-mapped."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from spark_kernels.ggml import GgmlTensor
from torch import Tensor

from spark_model.errors import CheckpointError
from spark_model.loaders.progress import Consumed, ProgressReport
from spark_model.loaders.source import missing_weight
from spark_model.safetensors_header import TensorEntry, read_checkpoint_tensors


class SafetensorsSource:
    """A WeightSource over a directory with model.safetensors or an index and its shards."""

    def __init__(self, directory: Path, report: ProgressReport | None) -> None:
        self.path = directory
        self._entries = read_checkpoint_tensors(directory)
        self._names = tuple(self._entries)
        self._files: dict[Path, safe_open] = {}
        self.consumed = Consumed(sum(entry.size for entry in self._entries.values()), report)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise missing_weight(self, name)
        return entry

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def file(self, name: str) -> Path:
        return self._entry(name).path

    def tensor(self, name: str) -> Tensor:
        entry = self._entry(name)
        try:
            if entry.path not in self._files:
                self._files[entry.path] = safe_open(entry.path, "pt")
            tensor: Tensor = self._files[entry.path].get_tensor(name)  # type: ignore[no-untyped-call]  # no stubs
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{entry.path}: `{name}` cannot be read: {error}") from error
        self.consumed.take(name, entry.size)
        return tensor

    def blocks(self, name: str) -> GgmlTensor | None:
        self._entry(name)
        return None

    def close(self) -> None:
        self._files.clear()
