"""Safetensors checkpoints: what is read, and what is refused before it is used."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from spark_model.checkpoint import Checkpoint
from spark_model.errors import CheckpointError, WeightMissingError
from spark_model.loaders import WeightSource, missing_weight, open_weights
from spark_model.loaders.progress import Consumed, terminal_progress
from spark_model.safetensors_header import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    read_checkpoint_tensors,
    read_safetensors_header,
    weight_files,
)


def open_directory(directory: Path, reports: list[tuple[int, int]] | None = None) -> WeightSource:
    progress = None if reports is None else lambda done, total: reports.append((done, total))
    return open_weights(Checkpoint("x", "x", "safetensors", directory), progress=progress)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed.weight": torch.randn(5, 4, generator=generator),
        "model.half.weight": torch.randn(3, generator=generator).bfloat16(),
        "model.empty": torch.zeros(0, 4),
        "model.scalar": torch.tensor(7),
        "model.fp8": torch.randn(2, 2, generator=generator).to(torch.float8_e4m3fn),
    }


def write_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def f32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def test_single_file(tmp_path: Path) -> None:
    wanted = tensors()
    save_file(wanted, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reports: list[tuple[int, int]] = []
    source = open_directory(tmp_path, reports)
    assert sorted(source.names()) == sorted(wanted)
    for name, tensor in wanted.items():
        got = source.tensor(name)
        assert got.dtype == tensor.dtype and got.shape == tensor.shape == source.shape(name)
        assert torch.equal(got.float(), tensor.float())
        assert source.blocks(name) is None
        assert source.file(name) == tmp_path / "model.safetensors"
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert reports[-1] == (total, total) and len(reports) == len(wanted)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_tensors_are_mapped_and_outlive_the_source(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = open_directory(tmp_path)
    first, again = source.tensor("model.embed.weight"), source.tensor("model.embed.weight")
    assert first.data_ptr() == again.data_ptr()
    source.close()
    assert torch.equal(first, tensors()["model.embed.weight"])


def write_shards(directory: Path) -> dict[str, str]:
    weight_map = {}
    for number in (1, 2):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({f"w{number}": torch.full((2,), float(number))}, directory / name)
        weight_map[f"w{number}"] = name
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": weight_map}))


def test_sharded(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    source = open_directory(tmp_path)
    assert source.names() == ("w1", "w2")
    assert source.tensor("w2").tolist() == [2.0, 2.0]
    assert source.file("w2") == tmp_path / weight_map["w2"]
    assert weight_files(tmp_path) == tuple(tmp_path / name for name in weight_map.values())


def test_sharded_with_a_missing_file(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    (tmp_path / weight_map["w2"]).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing: model-00002-of-00002\.safetensors"):
        open_directory(tmp_path)


def test_sharded_with_a_missing_tensor(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, weight_map | {"w3": weight_map["w2"]})
    with pytest.raises(CheckpointError) as caught:
        open_directory(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / weight_map['w2']}: tensor 'w3' is missing\n"
        "  hint: model.safetensors.index.json lists 3 tensors, the files hold 2; download it again"
    )


def test_sharded_with_an_extra_or_misplaced_tensor(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    save_file({"w1": torch.ones(2), "w9": torch.ones(2)}, tmp_path / weight_map["w1"])
    with pytest.raises(CheckpointError, match="tensor 'w9' is extra: the index does not list it"):
        open_directory(tmp_path)
    write_shards(tmp_path)
    write_index(tmp_path, {"w1": weight_map["w2"], "w2": weight_map["w2"]} | {"w8": weight_map["w1"]})
    with pytest.raises(CheckpointError, match="tensor 'w1' is extra: the index places it in model-00002"):
        open_directory(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "`weight_map` is missing"),
        ({}, "`weight_map` is missing"),
        ([], "`weight_map` is missing"),
        ({"w": "../x.safetensors"}, "'w' is in '../x.safetensors', wanted a plain"),
        ({"w": 3}, "'w' is in '3', wanted a plain"),
        ({"w": "x.bin"}, "'w' is in 'x.bin', wanted a plain"),
    ],
)
def test_wrong_index(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint_tensors(tmp_path)


def test_no_weights_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"wanted model\.safetensors.* it has pytorch_model\.bin, of which none"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", b"", None, "the header's length is 0"),
        ({}, b"", 1 << 63, "the header's length is 9223372036854775808"),
        ({}, b"", 9, "the header's length is 9, the file has 10 bytes"),
        (b"{not json", b"", None, "header: not valid JSON"),
        (b"\xff\xff", b"", None, "header: not valid JSON"),
        (b"[" * 100_000, b"", None, "nested too deep|not valid JSON"),
        (b"[]", b"", None, "wanted a JSON object, got list"),
        (b'{"a":{},"a":{}}', b"", None, "key 'a' appears twice"),
        ({"a": 1}, b"", None, "'a': wanted an object of dtype, shape and data_offsets"),
        ({"a": f32([1], 0, 4) | {"x": 1}}, b"1234", None, "'a': wanted an object"),
        ({"a": f32([1], 0, 4) | {"dtype": "F3"}}, b"1234", None, "'a': dtype is 'F3', this build reads F64"),
        ({"a": f32([1], 0, 4) | {"dtype": ["F32"]}}, b"1234", None, "'a': dtype is"),
        ({"a": f32([-1], 0, 4)}, b"1234", None, r"'a': shape is \[-1\]"),
        ({"a": f32([1] * 9, 0, 4)}, b"1234", None, "'a': shape is"),
        ({"a": f32([True], 0, 4)}, b"1234", None, r"'a': shape is \[True\]"),
        ({"a": f32([1.0], 0, 4)}, b"1234", None, r"'a': shape is \[1.0\]"),  # type: ignore[list-item]  # the fault
        ({"a": f32([1], 0, 8)}, b"1234", None, "'a' lies at bytes 0 to 8 of 4 bytes of data"),
        ({"a": f32([1], 4, 0)}, b"1234", None, "'a' lies at bytes 4 to 0"),
        ({"a": f32([2], 0, 4)}, b"1234", None, r"'a': F32 \[2\] takes 8 bytes, data_offsets give it 4"),
        ({"a": f32([1 << 40, 1 << 40, 0], 0, 4)}, b"1234", None, "takes 0 bytes, data_offsets give it 4"),
        ({"a": f32([1 << 62, 1 << 62], 0, 4)}, b"1234", None, "takes 85070591730234615865843651857942052864 bytes"),
        ({"a": f32([1], 0, 4), "b": f32([1], 2, 6)}, b"123456", None, "'b' starts at 2 and overlaps another tensor"),
        ({"a": f32([1], 0, 4), "b": f32([1], 8, 12)}, bytes(12), None, "'b' starts at 8 and leaves a gap, wanted 4"),
        ({"a": f32([1], 0, 4)}, bytes(8), None, "the tensors end at byte 4 of 8 bytes"),
        (b"version https://git-lfs", b"", struct.unpack("<Q", b"version ")[0], "Git LFS pointer"),
    ],
)  # fmt: skip
def test_wrong_header(header: Any, data: bytes, length: int | None, message: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors_header(path)
    assert str(caught.value).startswith(str(path))


def test_header_length_is_capped(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {}, b"", MAX_HEADER_BYTES + 1)
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=f"header has {MAX_HEADER_BYTES + 1} bytes, at most"):
        read_safetensors_header(path)


def test_truncated_anywhere_is_an_error(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_safetensors_header(path)


def test_missing_weight(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = open_directory(tmp_path)
    with pytest.raises(
        WeightMissingError, match=r"`model.embed.weigth` is missing\n.*5 tensors; the nearest are `model"
    ):
        source.tensor("model.embed.weigth")
    for asked in (source.shape, source.file, source.blocks):
        with pytest.raises(WeightMissingError):
            asked("zzzzzzzz")
    message = str(missing_weight(source, "zzzzzzzz", (3, 4)))
    assert message == (
        f"{tmp_path}: `zzzzzzzz` is missing (wanted with shape [3, 4])\n"
        "  hint: the checkpoint has 5 tensors, none with a similar name"
    )


def test_consumed_counts_each_tensor_once() -> None:
    consumed = Consumed(10, None)
    for name, size in (("a", 4), ("a", 4), ("b", 6)):
        consumed.take(name, size)
    assert consumed.bytes == consumed.total_bytes == 10


class FakeStream:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_progress(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeStream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich would take a pipe for a terminal then
    with terminal_progress("loading smollm2") as report:
        if report is not None:
            report(3_000_000, 4_000_000)
            report(4_000_000, 4_000_000)
    assert (report is not None) is is_terminal
    if is_terminal:
        assert "loading smollm2" in stream.text and "GB/s" in stream.text and "4.0/4.0 MB" in stream.text
    else:
        assert stream.text == ""
