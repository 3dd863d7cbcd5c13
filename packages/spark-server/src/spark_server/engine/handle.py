"""One engine process as the HTTP process holds it: started, spoken to, ended, reaped. No torch."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Self, cast

from spark_server import env, logs
from spark_server.config import EngineConfig
from spark_server.engine.frames import FromEngine, ToEngine
from spark_server.engine.transport import FrameError, FrameSplitter, decode_from_engine, encode_config, encode_frame

# Between the end of the socket and the end of the process, and the other way round. The two belong together; a
# process that does not follow is killed.
_GRACE_S = 0.5

_STDERR = 2

_log = logs.get_logger()


class EngineHandle(asyncio.Protocol):
    """A started engine process. Used from one event loop.

    on_frame   called with each frame
    on_lost    called once, when no frame can come any more
    ended      done when the process is reaped, after `on_lost`; its result is the exit code, negative for a signal.
               Await it through `wait` or asyncio.wait: a task that awaits a bare future cancels it when it is cancelled itself
    """

    def __init__(self, on_frame: Callable[[FromEngine], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._splitter = FrameSplitter()
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._is_lost = False
        self._exit_code: int | None = None
        self.ended: asyncio.Future[int] = self._loop.create_future()

    @classmethod
    async def spawn(
        cls, config: EngineConfig, runner: str, on_frame: Callable[[FromEngine], None], on_lost: Callable[[], None]
    ) -> Self:
        """Start a process that loads what `runner` (module:function) creates. It is loading when this returns."""
        handle = cls(on_frame, on_lost)
        ours, theirs = socket.socketpair()
        with theirs:
            handle._process = _start_process(theirs.fileno(), runner, config.num_threads)
        threading.Thread(target=handle._reap, name="engine-reaper", daemon=True).start()
        try:
            await handle._loop.create_unix_connection(lambda: handle, sock=ours)
        except BaseException:
            ours.close()
            handle.kill()
            handle._is_lost = True
            raise
        handle._write(encode_config(config))
        return handle

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, when the process is reaped."""
        return await asyncio.shield(self.ended)

    def send(self, frame: ToEngine) -> None:
        """Never waits. What is sent to a process that is gone is lost; `on_lost` tells."""
        self._write(encode_frame(frame))

    def kill(self) -> None:
        """End the process and what it started, at once."""
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                self._on_frame(decode_from_engine(body))
        except FrameError as error:
            _log.error("engine killed", reason=str(error))
            self.kill()
            self._close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_lost = True
        if self._exit_code is None:
            self._loop.call_later(_GRACE_S, self.kill)
        self._on_lost()
        self._note_end()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _reap(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._note_exit, code)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            return

    def _note_exit(self, code: int) -> None:
        self._exit_code = code
        if not self._is_lost:
            self._loop.call_later(_GRACE_S, self._close)
        self._note_end()

    def _note_end(self) -> None:
        if self._is_lost and self._exit_code is not None and not self.ended.done():
            self.ended.set_result(self._exit_code)


def _start_process(fd: int, runner: str, num_threads: int) -> "subprocess.Popen[bytes]":
    """Its own process group, so that Ctrl-C reaches the parent alone. What it prints goes to the parent's stderr."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "spark_server.engine.process", "--fd", str(fd), "--runner", runner],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        pass_fds=(fd,),
        process_group=0,
        env=env.engine_environment(num_threads),
    )
