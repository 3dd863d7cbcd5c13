"""Keeps an engine process running and routes its outputs: the EngineClient that the server uses. No torch."""

import asyncio
import itertools
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from spark_server import logs
from spark_server.config import EngineConfig
from spark_server.engine.client import EngineState
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
)
from spark_server.engine.handle import EngineHandle
from spark_server.engine.loading import MODEL_RUNNER
from spark_server.engine.stream import RequestStream
from spark_server.errors import EngineFailedError, NotReadyError, QueueFullError, StartupError

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
STALL_S = 60.0
# The engine ends at once when it is told to, also in a step; only a hung process needs this long.
_CLOSE_S = 3.0

_log = logs.get_logger()


class EngineSupervisor:
    """An EngineClient. `runner` is the module:function that the engine process calls to load its model."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: str = MODEL_RUNNER,
        restart_delay_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._runner = runner
        self._restart_delay_s = restart_delay_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._handle: EngineHandle | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._fatal: str | None = None
        self._restarts: deque[float] = deque()
        self._last_progress = clock()
        self.state: EngineState = "starting"
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._handle.pid if self._handle is not None and not self._handle.ended.done() else None

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have neither ended nor been closed."""
        return len(self._streams)

    async def start(self) -> None:
        try:
            await self._launch()
        except StartupError:
            if self.state == "starting":
                self.state = "failed"
            raise
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")

    def submit(self, request: Submit) -> RequestStream:
        limit = self._config.scheduler.max_num_seqs
        if self.state != "ready" or self._handle is None:
            raise NotReadyError(f"the engine is {self.state}; try again later")
        if len(self._streams) >= limit:
            raise QueueFullError(f"{len(self._streams)} requests run or wait, the limit is {limit} (--max-num-seqs)")
        if not self._streams:
            self._last_progress = self._clock()
        stream = RequestStream(request.request_id, self._abort)
        self._streams[request.request_id] = stream
        self._handle.send(request)
        return stream

    def new_request_id(self) -> int:
        return next(self._ids)

    def is_progressing(self) -> bool:
        if self.state != "ready":
            return False
        return not self._streams or self._clock() - self._last_progress < STALL_S

    async def close(self) -> None:
        self.state = "stopped"
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
            self._watcher = None
        self._fail_streams("the server was stopped")
        if self._handle is not None:
            await _end(self._handle)

    async def _launch(self) -> None:
        """Start a process and wait until it serves. Raises StartupError when it ends before."""
        self._fatal = None
        self._loaded = asyncio.get_running_loop().create_future()
        try:
            handle = await EngineHandle.spawn(self._config, self._runner, self._on_frame, self._on_lost)
        except OSError as error:
            raise StartupError(f"the engine process cannot be started: {error}") from error
        self._handle = handle
        either: list[asyncio.Future[Any]] = [self._loaded, handle.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            handle.kill()
            raise
        if not self._loaded.done():
            raise StartupError(
                self._fatal or f"the engine process {_describe_exit(handle.ended.result())} while loading"
            )

    async def _watch(self) -> None:
        """Replace the engine when it dies, at most MAX_RESTARTS times in RESTART_WINDOW_S."""
        assert self._handle is not None
        while self.state in ("ready", "restarting"):
            code = await self._handle.wait()
            _log.error("engine lost", reason=self._fatal or f"the process {_describe_exit(code)}")
            while self.state == "restarting":
                if not self._may_restart():
                    self.state = "failed"
                    _log.error(
                        "engine failed for good; restart the server", restarts=MAX_RESTARTS, within_s=RESTART_WINDOW_S
                    )
                    return
                await asyncio.sleep(self._restart_delay_s * 2 ** (len(self._restarts) - 1))
                try:
                    await self._launch()
                except StartupError as error:
                    _log.error("engine restart failed", reason=str(error))

    def _may_restart(self) -> bool:
        now = self._clock()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            return False
        self._restarts.append(now)
        return True

    def _on_frame(self, frame: FromEngine) -> None:
        if isinstance(frame, StepFrame):
            self._on_step(frame)
        elif isinstance(frame, Progress):
            _log.info("engine loading", step=frame.message)
        elif isinstance(frame, Fatal):
            self._fatal = frame.message
        else:
            self._on_ready(frame)

    def _on_ready(self, frame: Ready) -> None:
        self.ready = frame
        self._last_progress = self._clock()
        # Here, not where the launch resumes: the process may be lost before that, and then it is "restarting".
        if self.state != "stopped":
            self.state = "ready"
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)

    def _on_step(self, frame: StepFrame) -> None:
        if frame.stats.steps != (self.stats.steps if self.stats is not None else 0):
            self._last_progress = self._clock()
        self.stats = frame.stats
        for output in frame.outputs:
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        """Outputs of a request that was closed here, while they were on their way, have no taker."""
        stream = self._streams.get(output.request_id)
        if stream is not None:
            if output.finish is not None:
                del self._streams[output.request_id]
            stream.push(output)

    def _on_lost(self) -> None:
        self.stats = None
        if self.state == "ready":
            self.state = "restarting"
        reason = f": {self._fatal}" if self._fatal else ""
        self._fail_streams(f"the engine process died while the request ran{reason}")

    def _fail_streams(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineFailedError(message))

    def _abort(self, request_id: int) -> None:
        if self._streams.pop(request_id, None) is not None and self._handle is not None:
            self._handle.send(Abort(request_id))


async def _end(handle: EngineHandle) -> None:
    """Stop the process, kill it if it does not follow, and wait until it is reaped."""
    handle.send(Stop())
    await asyncio.wait([handle.ended], timeout=_CLOSE_S)
    if not handle.ended.done():
        handle.kill()
        await handle.wait()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
