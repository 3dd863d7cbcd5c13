"""The life of the HTTP process: bind, serve while the engine loads, drain, end.

The application drains itself before hypercorn is told to stop, because hypercorn cuts what runs after a few seconds.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import hypercorn
from hypercorn.asyncio import serve as serve_hypercorn
from hypercorn.typing import Framework

from spark_server import logs
from spark_server.config import HttpConfig
from spark_server.engine.client import EngineClient
from spark_server.errors import StartupError
from spark_server.http.app import create_app
from spark_server.http.drain import Drain
from spark_server.http.services import Services
from spark_server.pipeline import ModelText, Pipeline

logger = logs.get_logger()

BACKLOG = 1024
TEXT_THREADS = (
    2  # tokenizing releases the interpreter lock; two long prompts at once leave the other cores to the engine
)
KEEP_ALIVE_CONNECTION_S = 75  # longer than common client pools keep a connection, so that they close it, not we
REPEAT_S = 0.3  # uv forwards an interrupt after 0.2 s
MAX_HEADER_BYTES = 64 * 1024
CONNECTIONS_TIMEOUT_S = 1.0  # for the last bytes of drained responses to leave
ENGINE_CLOSE_TIMEOUT_S = 5.0
FORCED_ENGINE_CLOSE_TIMEOUT_S = 0.5


def serve(config: HttpConfig, *, create_engine: Callable[[], EngineClient], load_text: Callable[[], ModelText]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code 0. Call it from the main thread.

    create_engine   makes the client; its `start` runs while the server answers 503 already
    load_text       makes tokenizer and template; runs in a thread, next to the engine's start

    Raises StartupError when the port is taken (before anything else is started) or the engine fails to start, and
    what load_text raises. A second signal ends the process at once, with the exit code 128 + its number.
    """
    listener = bind_socket(config.host, config.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_Server(config, listener).run(create_engine, load_text))


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; clients that connect before the server runs wait in its backlog. Port 0 = any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"cannot resolve the address {host} (--bind): {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is in use; stop what uses it or choose another with --port"
            ) from None
        raise StartupError(f"cannot listen on {host} port {port} (--bind, --port): {error.strerror}") from None
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop where uvloop exists (it has no build for every interpreter), asyncio's elsewhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Signals:
    """The first SIGTERM or SIGINT asks for an orderly end, the second for the end.

    A launcher that forwards signals (uv run) and a signal to its whole process group make two of one: the same signal
    again within REPEAT_S is the first.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        self._received = 0.0

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if number == self.number and now - self._received < REPEAT_S:
            return
        self.number, self._received = number, now
        (self.second if self.first.is_set() else self.first).set()


class _Server:
    """One run of the server. `run` is called once."""

    def __init__(self, config: HttpConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._url = _url(config.host, listener.getsockname()[1])
        self._signals = _Signals()
        self._drain = Drain()
        self._stop_hypercorn = asyncio.Event()
        self._executor = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._tasks: list[asyncio.Future[Any]] = []  # the engine's start first

    async def run(self, create_engine: Callable[[], EngineClient], load_text: Callable[[], ModelText]) -> int:
        self._signals.install()
        engine = create_engine()
        try:
            await self._serve(engine, load_text)
            await self._finish()
        except BaseException:
            await self._close_connections()
            await self._close(engine)
            raise
        is_forced = self._signals.second.is_set()
        if not is_forced:
            await self._close_connections()
        await self._close(engine)
        if is_forced or any(not task.done() for task in self._tasks):
            _exit_now(128 + self._signals.number if is_forced else 0)
        return 0

    async def _serve(self, engine: EngineClient, load_text: Callable[[], ModelText]) -> None:
        """Returns when a signal asks to stop. Raises what engine.start and load_text raise."""
        loop = asyncio.get_running_loop()
        starting = self._spawn(engine.start())
        loading = loop.run_in_executor(self._executor, load_text)
        self._tasks.append(loading)
        if await self._completes(loading, starting):
            listening = self._spawn(self._serve_http(engine, loading.result()))
            if not starting.done():
                logger.info("listening; requests get 503 until the model is loaded", url=self._url)
            if await self._completes(starting, listening):
                logger.info("ready", url=self._url, model=self._config.served_model_names[0])
                await self._completes(listening)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def _completes(self, work: asyncio.Future[Any], *others: asyncio.Future[None]) -> bool:
        """Wait for `work`; False when a signal asked to stop first. Raises what `work` or one of `others` raised."""
        stop = asyncio.ensure_future(self._signals.first.wait())
        waiting: set[asyncio.Future[Any]] = {work, stop, *others}
        try:
            while not work.done() and not stop.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    finished.result()
            return work.done()
        finally:
            stop.cancel()

    async def _serve_http(self, engine: EngineClient, text: ModelText) -> None:
        services = Services(
            config=self._config,
            engine=engine,
            pipeline=Pipeline(engine, text, self._config, self._executor),
            executor=self._executor,
            drain=self._drain,
            started=int(time.time()),
        )
        # hypercorn's own type of an application is narrower than starlette's; both speak ASGI 3.
        app = cast(Framework, create_app(services))
        await serve_hypercorn(app, _hypercorn_config(self._listener), shutdown_trigger=self._stop_hypercorn.wait)

    async def _finish(self) -> None:
        """Drain; a second signal ends the wait."""
        timeout_s = self._config.shutdown_timeout_s
        name = signal.Signals(self._signals.number).name
        logger.info("stopping", signal=name, open=self._drain.num_open, timeout_s=timeout_s)
        finish = asyncio.create_task(self._drain.finish(timeout_s))
        forced = asyncio.create_task(self._signals.second.wait())
        await asyncio.wait({finish, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if finish.done():
            logger.info("stopped", cut=finish.result())
        else:
            logger.warning("stopped by a second signal", open=self._drain.num_open)

    async def _close_connections(self) -> None:
        """Stop listening; unless a client that does not read holds its connection, hypercorn ends within its time."""
        self._tasks[0].cancel()
        self._stop_hypercorn.set()
        await asyncio.wait(self._tasks, timeout=0.1 if self._drain.num_open else CONNECTIONS_TIMEOUT_S)

    async def _close(self, engine: EngineClient) -> None:
        timeout_s = FORCED_ENGINE_CLOSE_TIMEOUT_S if self._signals.second.is_set() else ENGINE_CLOSE_TIMEOUT_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.close(), timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._listener.close()


def _exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads that tokenise or clients that do not read."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _hypercorn_config(listener: socket.socket) -> hypercorn.Config:
    """Takes the listener over: hypercorn closes it."""
    config = hypercorn.Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_CONNECTION_S
    config.keep_alive_max_requests = sys.maxsize
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.graceful_timeout = 3600.0  # never used: the process ends first; hypercorn's own cut prints tracebacks
    config.accesslog = None
    errors = logging.getLogger("hypercorn.error")
    errors.setLevel(logging.WARNING)  # its own "Running on" line would be a second ready line
    config.errorlog = errors
    return config
