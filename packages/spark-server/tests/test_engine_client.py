"""The supervisor with real engine processes that run a script: streams, aborts, deaths, restarts."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest
import uvloop

from spark_server.config import SchedulerConfig
from spark_server.engine.client import EngineClient, EngineState
from spark_server.engine.frames import Output, Submit
from spark_server.engine.stream import RequestStream
from spark_server.engine.supervisor import MAX_RESTARTS, EngineSupervisor
from spark_server.engine.testing import SCRIPTED_RUNNER, ScriptedOptions, scripted_config, scripted_tokens
from spark_server.errors import EngineFailedError, NotReadyError, QueueFullError, StartupError

LIMITS = SchedulerConfig("fifo", max_batch_size=8, max_num_seqs=64, max_prefill_tokens=32, max_model_len=400)


def supervisor(options: ScriptedOptions, *, clock: Callable[[], float] = time.monotonic) -> EngineSupervisor:
    config = scripted_config(options, LIMITS)
    return EngineSupervisor(config, runner=SCRIPTED_RUNNER, restart_delay_s=0.01, clock=clock)


@asynccontextmanager
async def started(
    options: ScriptedOptions, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[EngineSupervisor]:
    engine = supervisor(options, clock=clock)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def run_bounded(
    main: Coroutine[None, None, None], run: Callable[[Coroutine[None, None, None]], None] = asyncio.run
) -> None:
    """A stream that never ends fails its test."""
    run(asyncio.wait_for(main, timeout=40))


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """The engine's frames drive this: at least one comes each second."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(stream: RequestStream) -> list[Output]:
    return [output async for output in stream]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def is_idle(engine: EngineSupervisor) -> bool:
    stats = engine.stats
    return stats is not None and (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


def state_of(engine: EngineSupervisor) -> EngineState:
    """Where a checker would otherwise remember the state from before an await."""
    return engine.state


async def kill_and_wait(engine: EngineSupervisor) -> None:
    """Kill the engine process and wait until its replacement serves or there is none."""
    victim = engine.pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    await until(lambda: engine.state == "failed" or (engine.state == "ready" and engine.pid != victim))


def is_zombie_or_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_supervisor_serves_and_closes(run: Callable[[Coroutine[None, None, None]], None]) -> None:
    async def main() -> None:
        async with started(ScriptedOptions()) as engine:
            client: EngineClient = engine
            assert client.state == "ready" and client.ready is not None and client.ready.num_blocks == 64
            pid = engine.pid
            assert pid is not None
            outputs = await collect(engine.submit(Submit(engine.new_request_id(), [1, 2, 3], 5)))
            assert tokens_of(outputs) == scripted_tokens([1, 2, 3], 5)
            assert [output.finish for output in outputs] == [None] * 4 + ["length"]
            assert engine.is_progressing() and engine.num_open == 0
        assert engine.state == "stopped" and not engine.is_progressing()
        assert not is_zombie_or_alive(pid)
        with pytest.raises(NotReadyError, match="the engine is stopped"):
            engine.submit(Submit(engine.new_request_id(), [1], 1))

    run_bounded(main(), run)


def test_sixty_four_streams_half_of_them_cut() -> None:
    async def main() -> None:
        generator = random.Random(0)
        async with started(ScriptedOptions(num_blocks=300, step_delay_s=0.0005)) as engine:
            prompts = {engine.new_request_id(): [generator.randrange(1000) for _ in range(1 + i)] for i in range(64)}
            cut = set(generator.sample(sorted(prompts), 32))

            async def use(id: int) -> list[Output]:
                stream = engine.submit(Submit(id, prompts[id], 30))
                if id not in cut:
                    return await collect(stream)
                outputs: list[Output] = []
                for _ in range(generator.randrange(12)):
                    outputs.append(await anext(stream))
                await stream.aclose()
                await stream.aclose()
                assert await collect(stream) == []
                return outputs

            results = dict(zip(prompts, await asyncio.gather(*map(use, prompts)), strict=True))
            for id, outputs in results.items():
                wanted = scripted_tokens(prompts[id], 30)
                made = tokens_of(outputs)
                assert made == (wanted[: len(made)] if id in cut else wanted)
                assert [output.finish for output in outputs if output.finish] == ([] if id in cut else ["length"])
            assert engine.num_open == 0
            await until(lambda: is_idle(engine))

    run_bounded(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_engine_killed_under_load_fails_every_stream_and_serves_again(number: signal.Signals) -> None:
    async def main() -> None:
        async with started(ScriptedOptions(num_blocks=3000, step_delay_s=0.001)) as engine:
            streams = [engine.submit(Submit(engine.new_request_id(), [id], 350)) for id in range(40)]
            await anext(streams[0])
            victim = engine.pid
            assert victim is not None
            os.kill(victim, number)
            killed = time.monotonic()
            endings = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert time.monotonic() - killed < 2
            assert all(isinstance(ending, EngineFailedError) for ending in endings)
            assert engine.state == "restarting" and engine.stats is None and engine.num_open == 0
            assert not engine.is_progressing()
            with pytest.raises(NotReadyError, match="the engine is restarting"):
                engine.submit(Submit(engine.new_request_id(), [1], 1))
            await until(lambda: engine.state == "ready")
            assert engine.pid != victim and not is_zombie_or_alive(victim)
            outputs = await collect(engine.submit(Submit(engine.new_request_id(), [1, 2], 5)))
            assert tokens_of(outputs) == scripted_tokens([1, 2], 5)

    run_bounded(main())


def test_engine_that_fails_in_a_step_says_why_and_is_replaced() -> None:
    async def main() -> None:
        async with started(ScriptedOptions(fail_at_step=4)) as engine:
            stream = engine.submit(Submit(engine.new_request_id(), [1], 50))
            received: list[Output] = []
            with pytest.raises(EngineFailedError, match="while the request ran: scripted: step 4 fails"):
                async for output in stream:
                    received.append(output)
            assert tokens_of(received) == scripted_tokens([1], 3)
            assert await collect(stream) == []
            await until(lambda: engine.state == "ready")
            assert len(await collect(engine.submit(Submit(engine.new_request_id(), [1], 3)))) == 3

    run_bounded(main())


def test_restarts_are_bounded() -> None:
    async def main() -> None:
        now = 0.0
        async with started(ScriptedOptions(), clock=lambda: now) as engine:
            for _ in range(MAX_RESTARTS):
                await kill_and_wait(engine)
                assert state_of(engine) == "ready"
            now = 601.0  # the first three are forgotten
            for _ in range(MAX_RESTARTS):
                await kill_and_wait(engine)
                assert state_of(engine) == "ready"
            await kill_and_wait(engine)
            assert state_of(engine) == "failed" and engine.pid is None
            with pytest.raises(NotReadyError, match="the engine is failed"):
                engine.submit(Submit(engine.new_request_id(), [1], 1))
        assert state_of(engine) == "stopped"

    run_bounded(main())


def test_engine_that_cannot_load_is_a_startup_error_with_its_line() -> None:
    async def main() -> None:
        engine = supervisor(ScriptedOptions(load_error="kv cache: 12 MiB do not fit"))
        with pytest.raises(StartupError, match="^kv cache: 12 MiB do not fit$"):
            await engine.start()
        assert engine.state == "failed"
        await engine.close()

    run_bounded(main())


def test_engine_killed_while_loading_is_a_startup_error() -> None:
    async def main() -> None:
        engine = supervisor(ScriptedOptions(load_delay_s=60))
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        os.kill(engine.pid or 0, signal.SIGKILL)
        with pytest.raises(StartupError, match="the engine process was killed by SIGKILL while loading"):
            await start
        await engine.close()

    run_bounded(main())


def test_close_while_loading_ends_both() -> None:
    async def main() -> None:
        engine = supervisor(ScriptedOptions(load_delay_s=60))
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        pid = engine.pid
        began = time.monotonic()
        await engine.close()
        with pytest.raises(StartupError):
            await start
        assert time.monotonic() - began < 3 and engine.state == "stopped"
        assert pid is not None and not is_zombie_or_alive(pid)

    run_bounded(main())


def test_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> None:
        engine = supervisor(ScriptedOptions(load_delay_s=60))
        start = asyncio.create_task(engine.start())
        await until(lambda: engine.pid is not None)
        pid = engine.pid
        start.cancel()
        await asyncio.wait([start])
        await until(lambda: pid is not None and not is_zombie_or_alive(pid))
        await engine.close()

    run_bounded(main())


def test_close_fails_open_streams_and_kills_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_server.engine.supervisor._CLOSE_S", 0.2)

    async def main() -> None:
        async with started(ScriptedOptions(step_delay_s=0.001)) as engine:
            stream = engine.submit(Submit(engine.new_request_id(), [1], 300))
            await anext(stream)
            pid = engine.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await engine.close()
            with pytest.raises(EngineFailedError):
                await collect(stream)
            assert not is_zombie_or_alive(pid) and engine.state == "stopped"
            await engine.close()

    run_bounded(main())


def test_submit_beyond_max_num_seqs_is_refused_until_one_is_closed() -> None:
    async def main() -> None:
        async with started(ScriptedOptions(step_delay_s=0.01)) as engine:
            streams = [engine.submit(Submit(engine.new_request_id(), [1], 300)) for _ in range(LIMITS.max_num_seqs)]
            with pytest.raises(QueueFullError, match=r"64 requests run or wait, the limit is 64 \(--max-num-seqs\)"):
                engine.submit(Submit(engine.new_request_id(), [1], 1))
            await streams.pop().aclose()
            assert tokens_of([await anext(streams[0])])
            streams.append(engine.submit(Submit(engine.new_request_id(), [1], 1)))
            for stream in streams:
                await stream.aclose()
            await until(lambda: is_idle(engine))

    run_bounded(main())


def test_progress_stops_when_steps_do() -> None:
    async def main() -> None:
        now = 0.0
        async with started(ScriptedOptions(step_delay_s=3600), clock=lambda: now) as engine:
            now = 1000.0
            assert engine.is_progressing()  # nothing to do
            stream = engine.submit(Submit(engine.new_request_id(), [1], 5))
            now = 1059.0
            assert engine.is_progressing()
            await until(lambda: engine.stats is not None)  # a heartbeat is no progress
            now = 1061.0
            assert not engine.is_progressing()
            await stream.aclose()
            assert engine.is_progressing()

    run_bounded(main())


def test_steps_are_progress() -> None:
    async def main() -> None:
        now = 0.0
        async with started(ScriptedOptions(), clock=lambda: now) as engine:
            stream = engine.submit(Submit(engine.new_request_id(), [1], 300))
            now = 50.0
            await anext(stream)
            now = 109.0
            assert engine.is_progressing()

    run_bounded(main())


def test_deadline_ends_a_request_that_waits() -> None:
    async def main() -> None:
        async with started(ScriptedOptions(step_delay_s=0.005)) as engine:
            running = [engine.submit(Submit(engine.new_request_id(), [1], 300)) for _ in range(LIMITS.max_batch_size)]
            waiting = engine.submit(Submit(engine.new_request_id(), [1], 5, deadline_s=0.05))
            assert [output.finish for output in await collect(waiting)] == ["timeout"]
            for stream in running:
                await stream.aclose()

    run_bounded(main())


def test_stream_closed_by_another_task_ends_the_one_that_waits() -> None:
    async def main() -> None:
        aborted: list[int] = []
        stream = RequestStream(7, aborted.append)
        reader = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        assert await reader == [] and aborted == [7]

    run_bounded(main())


def test_stream_hands_out_what_came_before_the_error_and_raises_once() -> None:
    async def main() -> None:
        aborted: list[int] = []
        stream = RequestStream(7, aborted.append)
        stream.push(Output(7, [1]))
        stream.fail(EngineFailedError("gone"))
        assert await anext(stream) == Output(7, [1])
        with pytest.raises(EngineFailedError, match="gone"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert aborted == []

    run_bounded(main())
