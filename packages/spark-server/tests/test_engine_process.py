"""The engine process by itself: what it does with its socket, its signals and its ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Self

import pytest

from spark_kernels.errors import SparkError
from spark_server.config import SchedulerConfig
from spark_server.engine.frames import (
    Abort,
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
from spark_server.engine.loading import max_step_tokens
from spark_server.engine.loop import EngineLoop
from spark_server.engine.process import one_line
from spark_server.engine.testing import (
    SCRIPTED_RUNNER,
    ScriptedOptions,
    ScriptedRunner,
    scripted_config,
    scripted_tokens,
)
from spark_server.engine.transport import decode_from_engine, encode_config, encode_frame, read_bodies
from spark_server.scheduler.scheduler import Scheduler

LIMITS = SchedulerConfig("fifo", max_batch_size=8, max_num_seqs=64, max_prefill_tokens=16, max_model_len=100)


class Engine:
    """A started engine process, spoken to with plain blocking sockets."""

    def __init__(
        self, options: ScriptedOptions, *, runner: str = SCRIPTED_RUNNER, limits: SchedulerConfig = LIMITS
    ) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-m", "spark_server.engine.process", "--fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, "--runner", runner],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                text=True,
            )
        self.socket.settimeout(20)
        self.socket.sendall(encode_config(scripted_config(options, limits)))
        self.frames = self._frames()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()

    def _frames(self) -> Iterator[FromEngine]:
        return (decode_from_engine(body) for body in read_bodies(self.socket))

    def wait_ready(self) -> Ready:
        return next(frame for frame in self.frames if isinstance(frame, Ready))

    def send(self, frame: ToEngine) -> None:
        self.socket.sendall(encode_frame(frame))

    def outputs(self) -> Iterator[Output]:
        for frame in self.frames:
            if isinstance(frame, StepFrame):
                yield from frame.outputs

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, within a bound."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


def test_process_loads_serves_and_stops() -> None:
    with Engine(ScriptedOptions(num_blocks=50)) as engine:
        assert next(engine.frames) == Progress("loading script")
        ready = engine.wait_ready()
        assert (ready.num_blocks, ready.block_size, ready.max_model_len, ready.vocab_size) == (50, 4, 100, 1000)
        engine.send(Submit(1, [1, 2, 3], 5))
        tokens = []
        for output in engine.outputs():
            tokens += output.token_ids
            if output.finish:
                break
        assert tokens == scripted_tokens([1, 2, 3], 5)
        engine.send(Stop())
        assert engine.end() == (0, "")


def test_ready_says_the_context_that_the_pool_allows() -> None:
    with Engine(ScriptedOptions(num_blocks=5)) as engine:
        assert engine.wait_ready().max_model_len == 21


def test_idle_process_beats_and_uses_no_processor() -> None:
    with Engine(ScriptedOptions()) as engine:
        engine.wait_ready()

        def processor_ticks() -> int:
            with open(f"/proc/{engine.process.pid}/stat") as file:
                fields = file.read().rsplit(") ", 1)[1].split()
            return int(fields[11]) + int(fields[12])

        next(engine.frames)
        before, started = processor_ticks(), time.monotonic()
        assert isinstance(next(engine.frames), StepFrame)
        assert time.monotonic() - started < 1.5
        assert processor_ticks() - before <= 2  # hundredths of a second


def test_process_beats_during_a_long_step() -> None:
    with Engine(ScriptedOptions(step_delay_s=30)) as engine:
        engine.wait_ready()
        engine.send(Submit(1, [1], 1))
        frames = [next(engine.frames) for _ in range(2)]
        assert all(isinstance(frame, StepFrame) and frame.stats.steps == 0 for frame in frames)
        engine.send(Stop())
        assert engine.end()[0] == 0


@pytest.mark.parametrize("moment", ["loading", "idle", "in a step"])
def test_process_ends_when_its_parent_is_gone(moment: str) -> None:
    delay = 60.0
    options = ScriptedOptions(load_delay_s=delay if moment == "loading" else 0, step_delay_s=delay)
    with Engine(options) as engine:
        next(engine.frames)
        if moment != "loading":
            engine.wait_ready()
        if moment == "in a step":
            engine.send(Submit(1, [1], 1))
        started = time.monotonic()
        engine.socket.shutdown(socket.SHUT_RDWR)
        assert engine.end()[0] == 0
        assert time.monotonic() - started < 5


def test_process_ends_when_its_parent_is_killed() -> None:
    """A parent of its own, killed with no chance to clean up; the engine's stderr pipe closes when the engine is gone."""
    code = (
        "import asyncio, sys\n"
        "from spark_server.config import SchedulerConfig\n"
        "from spark_server.engine.supervisor import EngineSupervisor\n"
        "from spark_server.engine.testing import SCRIPTED_RUNNER, ScriptedOptions, scripted_config\n"
        "async def main():\n"
        "    config = scripted_config(ScriptedOptions(), SchedulerConfig('fifo', 8, 64, 16, 100))\n"
        "    engine = EngineSupervisor(config, runner=SCRIPTED_RUNNER)\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as parent:  # type: ignore[call-overload]
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        parent.kill()
        parent.stderr.read()  # until every holder of the pipe, the engine too, is gone


def test_signals_of_the_terminal_leave_the_engine_alone() -> None:
    with Engine(ScriptedOptions()) as engine:
        engine.wait_ready()
        assert os.getpgid(engine.process.pid) == engine.process.pid
        for number in (signal.SIGINT, signal.SIGTERM):
            engine.process.send_signal(number)
        engine.send(Submit(1, [1], 2))
        assert sum(len(output.token_ids) for output in (next(engine.outputs()), next(engine.outputs()))) == 2


def test_load_failure_is_one_fatal_line() -> None:
    with Engine(ScriptedOptions(load_error="weights: 3 missing\n  hint: download again")) as engine:
        fatal = list(engine.frames)[-1]
        assert fatal == Fatal("weights: 3 missing; hint: download again")
        assert engine.end() == (1, "")


def test_unknown_runner_is_fatal_with_a_traceback() -> None:
    with Engine(ScriptedOptions(), runner="spark_server.engine.nowhere:create") as engine:
        assert list(engine.frames) == [Fatal("ModuleNotFoundError: No module named 'spark_server.engine.nowhere'")]
        code, errors = engine.end()
        assert code == 1 and "Traceback" in errors


def test_failing_step_is_fatal() -> None:
    with Engine(ScriptedOptions(fail_at_step=3)) as engine:
        engine.wait_ready()
        engine.send(Submit(1, [1], 50))
        frames = list(engine.frames)
        assert (
            sum(len(output.token_ids) for frame in frames if isinstance(frame, StepFrame) for output in frame.outputs)
            == 2
        )
        assert frames[-1] == Fatal("scripted: step 3 fails")
        code, errors = engine.end()
        assert code == 1 and "Traceback" in errors


@pytest.mark.parametrize("data", [b"\x03\0\0\0abc", b"\xff\xff\xff\xff"])
def test_broken_frame_is_fatal(data: bytes) -> None:
    with Engine(ScriptedOptions()) as engine:
        engine.wait_ready()
        engine.socket.sendall(data)
        assert isinstance(list(engine.frames)[-1], Fatal)
        assert engine.end()[0] == 1


def test_loop_frees_an_aborted_request_before_its_next_step() -> None:
    inbox: SimpleQueue[Submit | Abort] = SimpleQueue()
    frames: list[StepFrame] = []
    loop = EngineLoop(Scheduler(LIMITS, ScriptedRunner(ScriptedOptions())), inbox, frames.append)
    inbox.put(Submit(1, list(range(40)), 5))
    inbox.put(Submit(2, [1], 5))
    loop.iterate()
    inbox.put(Abort(1))
    inbox.put(Abort(2))
    loop.iterate()
    assert [frame.stats.running for frame in frames] == [2, 0]
    assert frames[-1] == StepFrame([], loop.stats)
    assert (loop.stats.steps, loop.stats.free_blocks) == (1, 64)


def test_loop_without_work_waits_for_a_command() -> None:
    inbox: SimpleQueue[Submit | Abort] = SimpleQueue()
    frames: SimpleQueue[StepFrame] = SimpleQueue()
    loop = EngineLoop(Scheduler(LIMITS, ScriptedRunner(ScriptedOptions())), inbox, frames.put)
    thread = threading.Thread(target=loop.iterate, daemon=True)
    thread.start()
    assert frames.empty() and thread.is_alive()
    inbox.put(Submit(1, [1], 1))
    assert [output.request_id for output in frames.get(timeout=10).outputs] == [1]


def test_one_line_names_the_type_of_a_foreign_error_only() -> None:
    assert one_line(SparkError("a\n  b")) == "a; b"
    assert one_line(KeyError("x")) == "KeyError: 'x'"
    assert one_line(MemoryError()) == "MemoryError"


def test_max_step_tokens_covers_chunks_and_decode() -> None:
    assert max_step_tokens(LIMITS) == 24
    assert max_step_tokens(SchedulerConfig("fifo", 8, 64, 0, 100)) == 108
