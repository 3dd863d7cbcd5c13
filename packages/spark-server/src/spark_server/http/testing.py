"""Stand-ins for the engine, the tokenizer and the template, for tests of the HTTP side without a model."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import hypercorn
from hypercorn.asyncio import serve as serve_hypercorn
from hypercorn.typing import Framework
from starlette.applications import Starlette

from spark_model.errors import TemplateError
from spark_server.answer_format import AnswerFormat
from spark_server.config import HttpConfig, SamplingDefaults
from spark_server.engine.client import EngineState
from spark_server.engine.frames import EngineStats, FinishReason, Output, Ready, Submit
from spark_server.errors import EngineFailedError, NotReadyError
from spark_server.http.app import create_app
from spark_server.http.drain import Drain
from spark_server.http.server import bind_socket
from spark_server.http.services import Services
from spark_server.pipeline import ModelText, Pipeline, Tokenizer

EOS = 256  # the byte tokenizer's ids are the bytes, and this
VOCAB_SIZE = 257

Script = Callable[[Submit], Iterable[Output]]


class ByteTokenizer:
    """One id a byte. `add_special` puts nothing in front."""

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())


class ByteDetokenizer:
    """Holds bytes back until they are whole characters."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, ids: Sequence[int]) -> str:
        self._bytes += bytes(token for token in ids if token != EOS)
        try:
            text, self._bytes = self._bytes.decode(), b""
        except UnicodeDecodeError as error:
            text, self._bytes = self._bytes[: error.start].decode(), self._bytes[error.start :]
        return text

    def finish(self) -> str:
        text, self._bytes = self._bytes.decode(errors="replace"), b""
        return text


class ByteVocabulary:
    """Each id is its byte; EOS spells "<eos>"."""

    def create_detokenizer(self, *, at_start: bool, skip_special: bool) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])


class LineTemplate:
    """Renders `role: content` lines; refuses a conversation whose last message is the assistant's."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        if messages[-1]["role"] == "assistant":
            raise TemplateError("the conversation must end with the user")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        lines += [f"{name} = {value}\n" for name, value in sorted(kwargs.items())]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


class FakeStream:
    """A stream whose outputs the test hands out."""

    def __init__(self, engine: "FakeEngine", request: Submit) -> None:
        self.request = request
        self.is_ended = False
        self._engine = engine
        self._outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()

    def emit(self, text: str | Sequence[int] = "", finish: FinishReason | None = None, **fields: Any) -> None:
        """Hand out the bytes of a text, or ids, as one output."""
        ids = list(text.encode()) if isinstance(text, str) else list(text)
        self.put(Output(self.request.request_id, ids, finish, **fields))

    def put(self, output: Output | Exception) -> None:
        self._outputs.put_nowait(output)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self.is_ended:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, Exception):
            self._end()
            raise output
        if output.finish is not None:
            self._end()
        return output

    async def aclose(self) -> None:
        if not self.is_ended:
            self._engine.aborted.append(self.request.request_id)
            self._end()

    def _end(self) -> None:
        self.is_ended = True
        self._engine.running.pop(self.request.request_id, None)
        self._engine.changed.set()


class FakeEngine:
    """An engine client that follows a script, or the test's own `emit` calls where there is none.

    script       makes all outputs of a request when it is submitted
    delay_s      between the outputs of a script; 0 = all at once
    load_s       how long `start` takes
    """

    def __init__(self, script: Script | None = None, *, delay_s: float = 0.0, load_s: float = 0.0) -> None:
        self.state: EngineState = "starting"
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self.submitted: list[Submit] = []
        self.aborted: list[int] = []
        self.running: dict[int, FakeStream] = {}
        self.changed = asyncio.Event()  # set whenever a request is submitted or ends
        self.is_stalled = False
        self.start_error: Exception | None = None
        self.max_model_len = 4096
        self._script = script
        self._delay_s = delay_s
        self._load_s = load_s
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def make_ready(self) -> None:
        self.ready = Ready(64, 16, self.max_model_len, VOCAB_SIZE, 0.1, 1000)
        self.stats = EngineStats(7, 0, 0, 64, 64)
        self.state = "ready"

    async def start(self) -> None:
        await asyncio.sleep(self._load_s)
        if self.start_error is not None:
            self.state = "failed"
            raise self.start_error
        self.make_ready()

    def new_request_id(self) -> int:
        return next(self._ids)

    def submit(self, request: Submit) -> FakeStream:
        if self.state != "ready":
            raise NotReadyError(f"the engine is {self.state}")
        stream = FakeStream(self, request)
        self.submitted.append(request)
        self.running[request.request_id] = stream
        self.changed.set()
        if self._script is not None:
            task = asyncio.get_running_loop().create_task(self._play(stream, self._script(request)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    async def _play(self, stream: FakeStream, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            stream.put(output)

    def is_progressing(self) -> bool:
        return self.state == "ready" and not self.is_stalled

    def fail(self, state: EngineState = "restarting") -> None:
        """The engine dies: every open stream raises."""
        self.state = state
        for stream in list(self.running.values()):
            stream.put(EngineFailedError("the engine process died (exit code -9)"))

    async def close(self) -> None:
        self.fail("stopped")

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until the condition holds; it is looked at whenever a request is submitted or ends."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def answer(text: str | Sequence[int], *, finish: FinishReason = "stop", chunk: int = 1) -> Script:
    """A script: admitted without tokens, then `chunk` tokens an output, then EOS for "stop" or the bare finish."""
    ids = list(text.encode()) if isinstance(text, str) else list(text)

    def play(request: Submit) -> list[Output]:
        outputs = [Output(request.request_id, [])]
        outputs += [Output(request.request_id, ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
        if finish == "stop":
            return [*outputs, Output(request.request_id, [EOS], "stop", EOS)]
        return [*outputs, Output(request.request_id, [], finish)]

    return play


def create_config(**changes: Any) -> HttpConfig:
    config = HttpConfig(
        host="127.0.0.1",
        port=0,
        served_model_names=("tiny", "tiny-alias"),
        max_model_len=4096,
        max_output_tokens=256,
        request_timeout_s=0.0,
        shutdown_timeout_s=5.0,
        max_queue_depth=0,
        max_body_bytes=32 * 1024 * 1024,
        chat_template=None,
        use_template_overrides=True,
        chat_template_kwargs={},
        sampling=SamplingDefaults(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, origin={}),
    )
    return replace(config, **changes)


def create_text(
    tokenizer: Tokenizer | None = None, *, has_template: bool = True, answer_format: AnswerFormat | None = None
) -> ModelText:
    template = LineTemplate() if has_template else None
    return ModelText(tokenizer or ByteTokenizer(), ByteVocabulary(), (EOS,), template, answer_format or AnswerFormat())


@dataclass(frozen=True, slots=True)
class Rig:
    """An application on a fake engine, and what the test may turn."""

    app: Starlette
    engine: FakeEngine
    services: Services


def create_rig(engine: FakeEngine, *, text: ModelText | None = None, ready: bool = True, **config: Any) -> Rig:
    """`config` changes fields of the configuration."""
    if ready:
        engine.make_ready()
    http_config = create_config(**config)
    executor = ThreadPoolExecutor(2, thread_name_prefix="text")
    services = Services(
        config=http_config,
        engine=engine,
        pipeline=Pipeline(engine, text or create_text(), http_config, executor),
        executor=executor,
        drain=Drain(),
        started=1_700_000_000,
    )
    return Rig(create_app(services), engine, services)


@asynccontextmanager
async def run_server(app: Starlette) -> AsyncIterator[str]:
    """The application behind a real server on loopback, in the test's own event loop; yields its URL."""
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    stop = asyncio.Event()
    config = hypercorn.Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = None
    config.graceful_timeout = 0.2
    server = asyncio.create_task(serve_hypercorn(cast(Framework, app), config, shutdown_trigger=stop.wait))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await server
