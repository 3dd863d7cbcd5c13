"""GGUF checkpoints, one file or split into several: metadata, tensor descriptions and mapped data. No torch."""

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from spark_model.errors import CheckpointError
from spark_model.gguf_header import GgufHeader, TensorInfo, Value, parse_header

__all__ = ["GgufFile", "TensorInfo", "Value", "first_split"]

SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SPLITS = 1000


class GgufFile:
    """An open GGUF checkpoint. Opening reads and checks the headers; tensor data is mapped, not read.

    path       the file that was given; of a split checkpoint the first
    paths      every file of the checkpoint, in order
    metadata   of the first file; arrays are tuples
    tensors    of all files, by name, in file order

    Raises CheckpointError for a file that is missing, truncated, corrupt, hostile or of an unknown kind.
    """

    path: Path
    paths: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = first_split(Path(path))
        self._mappings: dict[Path, mmap.mmap] = {}
        try:
            header = self._open(self.path)
            self.paths = _split_paths(self.path, header)
            headers = [header, *(self._open(other) for other in self.paths[1:])]
            self.metadata = header.metadata
            self.tensors = _merge(self.paths, headers)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> GgufHeader:
        mapping = map_file(path)
        self._mappings[path] = mapping
        return parse_header(mapping, path)

    def data(self, name: str) -> memoryview:
        """The stored bytes of a tensor, a view of the mapping: private to this process, never written back.

        Raises KeyError for a name that is not in `tensors`.
        """
        info = self.tensors[name]
        return memoryview(self._mappings[info.path])[info.offset : info.offset + info.size]

    def close(self) -> None:
        """Unmap the files. A file of which views are still alive is unmapped when the last of them goes."""
        while self._mappings:
            _, mapping = self._mappings.popitem()
            try:
                mapping.close()
            except BufferError:
                continue  # the views own the mapping now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file privately (copy on write, so that torch takes it as a buffer without a warning)."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is empty") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def first_split(path: Path) -> Path:
    """The first file of the split checkpoint that `path` belongs to; `path` itself if it is not split."""
    match = SPLIT_NAME.fullmatch(path.name)
    return path.with_name(_split_name(match["stem"], 1, int(match["count"]))) if match else path


def _split_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def _split_paths(path: Path, header: GgufHeader) -> tuple[Path, ...]:
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SPLITS:
        raise CheckpointError(f"{path}: split.count is {str(count)[:40]!r}, wanted a number up to {MAX_SPLITS}")
    match = SPLIT_NAME.fullmatch(path.name)
    named_count = int(match["count"]) if match else 1
    if max(count, 1) != named_count:
        wanted = _split_name(match["stem"] if match else path.stem, 1, count)
        raise CheckpointError(
            f"{path}: split.count is {count}, the file's name says {named_count}; wanted a name like {wanted}"
        )
    if match is None:
        return (path,)
    paths = tuple(
        path.with_name(_split_name(match["stem"], number, named_count)) for number in range(1, named_count + 1)
    )
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {named_count} files are missing: {', '.join(missing[:4])}")
    return paths


def _merge(paths: tuple[Path, ...], headers: list[GgufHeader]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if len(paths) > 1 and header.metadata.get("split.no") != number:
            got = str(header.metadata.get("split.no"))[:40]
            raise CheckpointError(f"{path}: split.no is {got}, wanted {number}: files of different models are mixed")
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {tensors[name].path.name}")
            tensors[name] = info
    wanted = headers[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(
            f"{paths[0]}: {len(tensors)} tensors in {len(paths)} files, split.tensors.count is {wanted}"
        )
    return tensors
