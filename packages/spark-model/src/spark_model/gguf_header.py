"""The header of one GGUF file: metadata and tensor descriptions, checked against the file's size. No torch.

The file is not trusted: every count and length is compared with the bytes that are left before anything is allocated.
Every failure is a CheckpointError that names the file, what is wrong, what was found and what was expected.

Layout, little-endian: "GGUF", u32 version, u64 tensor count, u64 key count, the keys, the tensor descriptions, padding,
the data. Strings are a u64 length and UTF-8 bytes.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from spark_kernels.ggml.types import TYPES_BY_ID, UNREAD_TYPES, GgmlType

from spark_model.errors import CheckpointError

Value = int | float | bool | str | tuple["Value", ...]

MAX_HEADER_BYTES = 256 << 20  # a 256k-token vocabulary with merges takes about 10 MB
MAX_VALUES = 8 << 20  # array elements of one file; each is a Python object
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024  # of keys and tensors; names of real files stay below 100
MAX_DIMENSIONS = 4
MAX_NESTING = 2
DEFAULT_ALIGNMENT = 32

TYPE_BOOL, TYPE_STRING, TYPE_ARRAY = 7, 8, 9
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", TYPE_BOOL: "B", 10: "Q", 11: "q", 12: "d"}
MINIMUM_SIZES = {TYPE_STRING: 8, TYPE_ARRAY: 12} | {id: struct.calcsize(code) for id, code in NUMBER_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` in torch's order (slowest first); `offset` in bytes from the start of `path`."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def parse_header(buffer: bytes | mmap.mmap, path: Path) -> GgufHeader:
    """Read the header at the start of `buffer`, the whole file's bytes (or a mapping of them)."""
    return _HeaderParser(buffer, path).parse()


class _HeaderParser:
    def __init__(self, buffer: bytes | mmap.mmap, path: Path) -> None:
        self.view = memoryview(buffer)
        self.path = path
        self.position = 0
        self.file_size = len(self.view)
        self.end = min(self.file_size, MAX_HEADER_BYTES)
        self.values_left = MAX_VALUES

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def parse(self) -> GgufHeader:
        try:
            version, num_tensors, num_keys = self.read_preamble()
            metadata = self.read_metadata(num_keys)
            tensors = self.read_tensors(num_tensors, self.read_alignment(metadata))
        finally:
            self.view.release()
        return GgufHeader(version, metadata, tensors)

    def read_preamble(self) -> tuple[int, int, int]:
        magic = bytes(self.view[:4])
        if magic != b"GGUF":
            hint = "; this is a Git LFS pointer, fetch the real file" if bytes(self.view[:8]) == b"version " else ""
            raise self.fail(f"not a GGUF file: it starts with {magic!r}, wanted b'GGUF'{hint}")
        if self.file_size < 24:
            raise self.fail(f"truncated: {self.file_size} bytes, a GGUF header takes at least 24")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self.view, 4)
        self.position = 24
        if version & 0xFFFF == 0:
            raise self.fail("big-endian GGUF, only little-endian files are read")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version}, wanted 2 or 3")
        if num_tensors > MAX_TENSORS:
            raise self.fail(f"tensor count {num_tensors}, at most {MAX_TENSORS} are read")
        self.check_count("tensor count", num_tensors, 32)
        self.check_count("metadata key count", num_keys, 13)
        return version, num_tensors, num_keys

    def check_count(self, what: str, count: int, minimum_size: int) -> None:
        left = self.end - self.position
        if count * minimum_size > left:
            raise self.fail(f"{what} {count} at byte {self.position} takes more than the {left} bytes left")

    def read_number(self, what: str, code: str) -> int:
        size = struct.calcsize(code)
        if self.end - self.position < size:
            raise self.fail(f"truncated at byte {self.position} in {what}")
        (value,) = struct.unpack_from("<" + code, self.view, self.position)
        self.position += size
        return value  # type: ignore[no-any-return]  # struct is untyped; "f" and "d" give floats, which only values use

    def read_name(self, what: str) -> str:
        length = self.read_number(what, "Q")
        if length > MAX_NAME_BYTES:
            raise self.fail(f"{what} has a length of {length} bytes, at most {MAX_NAME_BYTES} are read")
        return self.read_text(what, length)

    def read_string(self, what: str) -> str:
        return self.read_text(what, self.read_number(what, "Q"))

    def read_text(self, what: str, length: int) -> str:
        self.check_count(f"length of {what}", length, 1)
        stop = self.position + length
        try:
            text = str(self.view[self.position : stop], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at byte {self.position} is not UTF-8: {error.reason}") from error
        self.position = stop
        return text

    def read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(count):
            key = self.read_name(f"metadata key {index}")
            if key in metadata:
                raise self.fail(f"metadata key {key!r} appears twice")
            metadata[key] = self.read_value(repr(key), self.read_number(f"the type of {key!r}", "I"), 0)
        return metadata

    def read_value(self, what: str, type: int, depth: int) -> Value:
        if type == TYPE_STRING:
            return self.read_string(what)
        if type == TYPE_ARRAY:
            return self.read_array(what, depth)
        if type not in NUMBER_FORMATS:
            raise self.fail(f"{what} has value type {type}, wanted 0 to 12")
        number = self.read_number(what, NUMBER_FORMATS[type])
        return self.to_bools(what, (number,))[0] if type == TYPE_BOOL else number

    def to_bools(self, what: str, numbers: tuple[int, ...]) -> tuple[bool, ...]:
        if any(number > 1 for number in numbers):
            raise self.fail(f"{what} is a bool of {max(numbers)}, wanted 0 or 1")
        return tuple(number == 1 for number in numbers)

    def read_array(self, what: str, depth: int) -> tuple[Value, ...]:
        if depth == MAX_NESTING:
            raise self.fail(f"{what}: arrays nested deeper than {MAX_NESTING}")
        type = self.read_number(f"the element type of {what}", "I")
        count = self.read_number(f"the length of {what}", "Q")
        if type not in MINIMUM_SIZES:
            raise self.fail(f"{what} has element type {type}, wanted 0 to 12")
        self.check_count(f"element count of {what}", count, MINIMUM_SIZES[type])
        self.values_left -= count
        if self.values_left < 0:
            raise self.fail(f"more than {MAX_VALUES} array elements in the metadata (in {what})")
        if type == TYPE_STRING:
            return self.read_strings(what, count)
        if type == TYPE_ARRAY:
            return tuple(self.read_array(what, depth + 1) for _ in range(count))
        numbers = struct.unpack_from(f"<{count}{NUMBER_FORMATS[type]}", self.view, self.position)
        self.position += count * MINIMUM_SIZES[type]
        return self.to_bools(what, numbers) if type == TYPE_BOOL else numbers

    def read_strings(self, what: str, count: int) -> tuple[str, ...]:
        # read_string() inlined: vocabularies have 100,000s of strings, and this loop is most of the time of a header
        view, position, end = self.view, self.position, self.end
        unpack_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for index in range(count):
            start = position + 8
            if start > end:
                raise self.fail(f"truncated at byte {position} in string {index} of {what}")
            position = start + unpack_length(view, position)[0]
            if position > end:
                raise self.fail(f"string {index} of {what} at byte {start} has {position - start} bytes, past the end")
            try:
                strings.append(str(view[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.fail(f"string {index} of {what} at byte {start} is not UTF-8: {error.reason}") from error
        self.position = position
        return tuple(strings)

    def read_alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {str(alignment)[:40]!r}, wanted a power of two up to 1 MiB")
        return alignment

    def read_tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        infos: dict[str, tuple[GgmlType, tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = self.read_name(f"the name of tensor {index}")
            if name in infos:
                raise self.fail(f"tensor {name!r} appears twice")
            infos[name] = self.read_tensor(f"tensor {name!r}", alignment)
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, (type, shape, offset, size) in infos.items():
            begin = data_start + offset
            if begin + size > self.file_size:
                raise self.fail(
                    f"tensor {name!r} lies at bytes {begin} to {begin + size}, the file has {self.file_size}; "
                    "it is truncated or corrupt, download it again"
                )
            tensors[name] = TensorInfo(name, type, shape, self.path, begin, size)
        return tensors

    def read_tensor(self, what: str, alignment: int) -> tuple[GgmlType, tuple[int, ...], int, int]:
        num_dimensions = self.read_number(f"the dimensions of {what}", "I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"{what} has {num_dimensions} dimensions, wanted 1 to {MAX_DIMENSIONS}")
        stored = [self.read_number(f"the shape of {what}", "Q") for _ in range(num_dimensions)]  # fastest first
        type_id = self.read_number(f"the type of {what}", "I")
        offset = self.read_number(f"the offset of {what}", "Q")
        type = TYPES_BY_ID.get(type_id)
        if type is None:
            known = ", ".join(entry.name for entry in GgmlType)
            named = f" ({UNREAD_TYPES[type_id]})" if type_id in UNREAD_TYPES else ""
            raise self.fail(f"{what} has type {type_id}{named}, this build reads {known}")
        if 0 in stored:
            raise self.fail(f"{what} has shape {stored[::-1]}, wanted dimensions of at least 1")
        try:
            size = type.row_bytes(stored[0])
        except ValueError as error:
            raise self.fail(f"{what}: {error}") from error
        for dimension in stored[1:]:
            size *= dimension
        if size > self.file_size:
            raise self.fail(f"{what} of shape {stored[::-1]} takes {size} bytes, the file has {self.file_size}")
        if offset % alignment:
            raise self.fail(f"{what} has offset {offset}, wanted a multiple of the alignment {alignment}")
        return type, tuple(reversed(stored)), offset, size
