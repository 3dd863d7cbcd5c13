"""Frames: cutting, coding, bounds, and a sender that waits for nobody."""

import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spark_model.checkpoint import Checkpoint
from spark_model.recipes import Recipe
from spark_runtime.types import SamplingParams
from spark_server.config import SchedulerConfig
from spark_server.engine.frames import (
    Abort,
    EngineStats,
    Fatal,
    FromEngine,
    Output,
    Progress,
    Ready,
    StepFrame,
    Stop,
    Submit,
    ToEngine,
)
from spark_server.engine.testing import ScriptedOptions, scripted_config
from spark_server.engine.transport import (
    MAX_FRAME_BYTES,
    FrameError,
    FrameSender,
    FrameSplitter,
    decode_config,
    decode_from_engine,
    decode_to_engine,
    encode_config,
    encode_frame,
    read_bodies,
)

STATS = EngineStats(steps=7, running=2, waiting=1, free_blocks=3, total_blocks=9)
TO_ENGINE: list[ToEngine] = [
    Submit(1, [5, 6, 7], 10),
    Submit(2, list(range(5000)), 10, SamplingParams(0.0, seed=2**63), [2], min_tokens=1, deadline_s=1.5),
    Abort(2),
    Stop(),
]
FROM_ENGINE: list[FromEngine] = [
    Progress("reading weights"),
    Ready(num_blocks=9, block_size=16, max_model_len=100, vocab_size=50, load_seconds=0.5, memory_bytes=1 << 40),
    StepFrame([], STATS),
    StepFrame([Output(1, [4]), Output(2, [3], "stop", 3), Output(3, [], "error", error="no")], STATS),
    Fatal("device lost"),
]


def test_frames_survive_any_cut() -> None:
    to_engine = b"".join(encode_frame(frame) for frame in TO_ENGINE)
    from_engine = b"".join(encode_frame(frame) for frame in FROM_ENGINE)
    for size in (1, 2, 3, 5, 7, 100, len(to_engine)):
        splitter = FrameSplitter()
        cuts = [to_engine[start : start + size] for start in range(0, len(to_engine), size)]
        assert [decode_to_engine(body) for cut in cuts for body in splitter.feed(cut)] == TO_ENGINE
    for size in (1, 4, 11, len(from_engine)):
        splitter = FrameSplitter()
        cuts = [from_engine[start : start + size] for start in range(0, len(from_engine), size)]
        assert [decode_from_engine(body) for cut in cuts for body in splitter.feed(cut)] == FROM_ENGINE


def test_frame_beyond_the_bound_is_refused_before_it_arrives() -> None:
    splitter = FrameSplitter()
    with pytest.raises(FrameError, match=f"frame of {MAX_FRAME_BYTES + 1} bytes, the limit is {MAX_FRAME_BYTES}"):
        splitter.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameError, match="the limit is"):
        encode_frame(Progress("x" * MAX_FRAME_BYTES))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"hello", encode_frame(Fatal("no request"))[4:]])
def test_decode_of_a_foreign_body_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError, match=f"frame of {len(body)} bytes is not one of ours"):
        decode_to_engine(body)


def test_config_arrives_as_it_was() -> None:
    config = scripted_config(ScriptedOptions(), SchedulerConfig("fifo", 8, 64, 512, 2048))
    recipe = Recipe("r", Path("/r.yaml"), "m", {"port": 1, "x": 0.5, "on": True, "s": "t"}, {"A": "b"}, "text")
    checkpoint = Checkpoint("m", "n", "safetensors", Path("/models/m"), recipe)
    for wanted in (config, replace(config, checkpoint=checkpoint)):
        (body,) = FrameSplitter().feed(encode_config(wanted))
        assert decode_config(body) == wanted


def test_config_that_is_none_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="no EngineConfig"):
        decode_config(encode_frame(Stop())[4:])


def test_read_bodies_ends_with_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(encode_frame(Abort(1)) + encode_frame(Abort(2))[:3])
        ours.close()
        assert [decode_to_engine(body) for body in read_bodies(theirs)] == [Abort(1)]


def test_sender_does_not_wait_for_a_slow_reader_and_keeps_the_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        frames = [Progress(f"{index}" + "x" * 10_000) for index in range(1000)]  # 10 MB, far above the socket's buffer
        for frame in frames:
            sender.send(frame)
        assert not sender.flush(0.01)
        received: list[FromEngine] = []
        for body in read_bodies(theirs):
            received.append(decode_from_engine(body))
            if len(received) == len(frames):
                break
        assert received == frames
        assert sender.flush(5)


def test_sender_keeps_the_order_while_the_reader_catches_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = FrameSender(ours)
        frames: list[FromEngine] = [Progress(f"{index}" + "x" * 20_000) for index in range(2000)]
        received: list[FromEngine] = []
        reader = threading.Thread(target=lambda: received.extend(map(decode_from_engine, read_bodies(theirs))))
        reader.start()
        for frame in frames:
            sender.send(frame)
        assert sender.flush(20)
        ours.shutdown(socket.SHUT_RDWR)
        reader.join()
        assert received == frames


def test_sender_drops_frames_when_nobody_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        sender = FrameSender(ours)
        for _ in range(3):
            sender.send(Progress("x" * 1_000_000))
        assert sender.flush(5)


def test_sender_beats_while_the_loop_is_silent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        is_loaded = threading.Event()
        sender = FrameSender(ours, lambda: StepFrame([], STATS) if is_loaded.is_set() else None, interval_s=0.02)
        sender.send(Progress("loading"))
        bodies = read_bodies(theirs)
        assert decode_from_engine(next(bodies)) == Progress("loading")
        is_loaded.set()
        assert [decode_from_engine(next(bodies)) for _ in range(3)] == [StepFrame([], STATS)] * 3


@pytest.mark.parametrize(
    "module",
    ["client", "frames", "handle", "loading", "loop", "process", "stream", "supervisor", "testing", "transport"],
)
def test_importing_engine_modules_imports_no_torch(module: str) -> None:
    code = (
        f"import sys, spark_server.engine.{module};"
        "sys.exit(', '.join({'torch', 'cupy', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
