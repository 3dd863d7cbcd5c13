"""Safetensors checkpoints, one file or sharded with an index: which tensor lies where, checked before use. No torch.

A file is a u64 length, that many bytes of JSON and the data: name → {dtype, shape, data_offsets}, without gaps.
Every failure is a CheckpointError that names the file, what is wrong, what was found and what was expected.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_model.errors import CheckpointError
from spark_model.json_files import parse_json_object, read_json_object

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

MAX_HEADER_BYTES = 24 << 20  # about 180,000 tensors in one file; parsed JSON takes up to 30 times its text
MAX_DIMENSIONS = 8
ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `dtype` in the format's own spelling, `size` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    size: int


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, in the order of their data."""
    try:
        with path.open("rb") as file:
            file_size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise CheckpointError(f"{path}: this is a Git LFS pointer, fetch the real file")
            if file_size < 10 or not 2 <= length <= file_size - 8:
                raise CheckpointError(
                    f"{path}: the header's length is {length}, the file has {file_size} bytes; "
                    "it is truncated or not a safetensors file"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: the header has {length} bytes, at most {MAX_HEADER_BYTES} are read")
            text = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_json_object(text, f"{path}: header")
    header.pop("__metadata__", None)
    return _check_entries(header, path, file_size - 8 - length)


def _check_entries(header: dict[str, Any], path: Path, data_size: int) -> dict[str, TensorEntry]:
    placed: list[tuple[int, int, str, TensorEntry]] = []
    for name, fields in header.items():
        what = f"{path}: tensor {name[:200]!r}"
        if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(f"{what}: wanted an object of dtype, shape and data_offsets")
        dtype, shape = fields["dtype"], fields["shape"]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise CheckpointError(f"{what}: dtype is {str(dtype)[:40]!r}, this build reads {', '.join(ITEM_SIZES)}")
        if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise CheckpointError(f"{what}: shape is {str(shape)[:80]}, wanted at most {MAX_DIMENSIONS} whole numbers")
        if not _are_counts(fields["data_offsets"]) or len(fields["data_offsets"]) != 2:
            raise CheckpointError(
                f"{what}: data_offsets is {str(fields['data_offsets'])[:80]}, wanted two whole numbers"
            )
        begin, end = fields["data_offsets"]
        if not begin <= end <= data_size:
            raise CheckpointError(
                f"{what} lies at bytes {begin} to {end} of {data_size} bytes of data; the file is truncated or corrupt"
            )
        size = math.prod(shape) * ITEM_SIZES[dtype]
        if end - begin != size:
            raise CheckpointError(f"{what}: {dtype} {shape} takes {size} bytes, data_offsets give it {end - begin}")
        placed.append((begin, end, name, TensorEntry(dtype, tuple(shape), path, size)))
    placed.sort(key=lambda entry: entry[:2])
    position = 0
    for begin, end, name, _ in placed:
        if begin != position:
            problem = "overlaps another tensor" if begin < position else "leaves a gap"
            raise CheckpointError(f"{path}: tensor {name[:200]!r} starts at {begin} and {problem}, wanted {position}")
        position = end
    if position != data_size:
        raise CheckpointError(f"{path}: the tensors end at byte {position} of {data_size} bytes of data")
    return {name: entry for _, _, name, entry in placed}


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint directory, existing, in order; the first found of a single file and an index.

    Raises CheckpointError if there are none, or if files that the index lists are missing.
    """
    single = directory / SINGLE_NAME
    if single.is_file():
        return (single,)
    index = directory / INDEX_NAME
    if not index.is_file():
        found = sorted(entry.name for entry in directory.iterdir() if entry.suffix in {".bin", ".pt", ".safetensors"})
        hint = f"; it has {', '.join(found[:4])}, of which none is read" if found else ""
        raise CheckpointError(f"{directory}: no weights: wanted {SINGLE_NAME}, {INDEX_NAME} or a .gguf file{hint}")
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(names)} files are missing: {', '.join(missing[:4])}; download them again"
        )
    return tuple(directory / name for name in names)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: `weight_map` is missing, wanted an object of tensor name to file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name[:200]!r} is in {str(file)[:80]!r}, wanted a plain .safetensors name")
    return weight_map


def read_checkpoint_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of the directory's checkpoint. A sharded one must hold exactly what its index lists."""
    files = weight_files(directory)
    if files[0].name == SINGLE_NAME:
        return read_safetensors_header(files[0])
    index = directory / INDEX_NAME
    weight_map = _weight_map(index)
    tensors: dict[str, TensorEntry] = {}
    for path in files:
        for name, entry in read_safetensors_header(path).items():
            listed = weight_map.get(name)
            if listed != path.name:
                where = f"the index places it in {listed}" if listed else "the index does not list it"
                raise CheckpointError(f"{path}: tensor {name[:200]!r} is extra: {where}")
            tensors[name] = entry
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        name = missing[0]
        raise CheckpointError(
            f"{directory / weight_map[name]}: tensor {name[:200]!r} is missing\n"
            f"  hint: {INDEX_NAME} lists {len(weight_map)} tensors, the files hold {len(tensors)}; download it again"
        )
    return tensors
