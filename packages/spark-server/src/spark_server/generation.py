"""The internal request, the internal deltas, and the way from one to the other.

A protocol file lowers its body to a `GenerationRequest`; `Pipeline.start` renders, tokenises, checks and submits it, and
returns once the engine took it (until then every refusal is a plain HTTP error). `Generation.deltas` then hands out
`TextDelta`s and, last, one `Ending`. Text is known only here, so stop strings are found here; the engine knows ids.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import anyio

from spark_runtime.types import SamplingParams
from spark_server.config import HttpConfig
from spark_server.engine.client import EngineClient, EngineStream
from spark_server.engine.frames import Output, Submit
from spark_server.errors import (
    EngineFailedError,
    InvalidRequestError,
    NotReadyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
)
from spark_server.stop_strings import StopMatcher

EndReason = Literal["stop", "length", "timeout"]

# A prompt up to this many characters is rendered and tokenised in about a millisecond, less than a thread's round trip
# under load is worth; longer ones go to the executor so that the event loop never blocks.
INLINE_CHARACTERS = 4096


class Tokenizer(Protocol):
    """What is needed of spark_model.tokenizer.Tokenizer."""

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]: ...


class Detokenizer(Protocol):
    """What is needed of spark_model.detokenizer.IncrementalDetokenizer; one for each choice."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class ChatTemplate(Protocol):
    """What is needed of spark_model.chat_template.ChatTemplate. Called from several threads."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelText:
    """Between text and ids.

    eos_token_ids        every id that ends a turn
    create_detokenizer   called with at_start: the text begins here, and does not go on from a prompt's
    chat_template        None: the model has none, so only prompts without messages work
    """

    tokenizer: Tokenizer
    eos_token_ids: Sequence[int]
    create_detokenizer: Callable[[bool], Detokenizer]
    chat_template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template takes them, content as one string each."""

    messages: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool = True

    def num_characters(self) -> int:
        return sum(len(str(message)) for message in self.messages)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str

    def num_characters(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One choice to generate, whatever protocol asked for it.

    max_tokens    new tokens at most; None = as many as --max-output-tokens and the context allow, which bound it anyway
    timeout_s     from `received`, a time.monotonic() value; 0 = none
    """

    prompt: ChatPrompt | TextPrompt | TokenPrompt
    sampling: SamplingParams
    max_tokens: int | None
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    timeout_s: float
    received: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class Ending:
    """The last delta. completion_tokens counts the stop token, and nothing after a stop string."""

    reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None


Delta = TextDelta | Ending


class Generation:
    """One request at the engine. Read `deltas` once; `aclose` frees its slot, however far it came."""

    def __init__(self, stream: EngineStream, text: ModelText, request: GenerationRequest, prompt_tokens: int) -> None:
        self._stream = stream
        self._outputs = stream.__aiter__()
        self._detokenizer = text.create_detokenizer(isinstance(request.prompt, ChatPrompt))
        self._matcher = StopMatcher(request.stop_strings)
        self._min_tokens = request.min_tokens
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._first: Output | None = None

    async def wait_admitted(self) -> None:
        """Return when the engine took the request. Raises what it refused or failed with."""
        self._first = await self._next_output()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every delta in order, one `Ending` last. Raises EngineFailedError, RequestTimeoutError or ServerError instead."""
        assert self._first is not None, "wait_admitted comes first"
        output = self._first
        while True:
            text, stop = self._show(output)
            if stop is None and output.finish is not None:
                tail, stop = self._finish()
                text += tail
            if text:
                yield TextDelta(text)
            if stop is not None:
                await self.aclose()
                yield self._ending("stop", stop)
                return
            if output.finish is not None:
                yield self._ending(_end_reason(output), None)
                return
            output = await self._next_output()

    async def aclose(self) -> None:
        """Abort the request if it still runs. Works inside a cancelled scope; may be called again."""
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()

    async def _next_output(self) -> Output:
        try:
            output = await self._outputs.__anext__()
        except StopAsyncIteration:
            raise EngineFailedError("the engine ended the request without an ending") from None
        if output.finish in ("error", "abort"):
            raise ServerError(output.error or f"the engine ended the request with {output.finish!r}")
        if output.finish == "timeout" and not self._completion_tokens and not output.token_ids:
            raise RequestTimeoutError("the request's time ran out before it produced a token")
        return output

    def _show(self, output: Output) -> tuple[str, str | None]:
        """The text of one output, token by token: tokens after the one that completes a stop string do not count."""
        hidden = 1 if output.stop_token_id is not None else 0
        shown: list[str] = []
        for token_id in output.token_ids[: len(output.token_ids) - hidden]:
            self._completion_tokens += 1
            piece = self._detokenizer.push([token_id])
            if self._completion_tokens < self._min_tokens:
                shown.append(piece)
                continue
            text, stop = self._matcher.push(piece)
            shown.append(text)
            if stop is not None:
                return "".join(shown), stop
        self._completion_tokens += hidden
        return "".join(shown), None

    def _finish(self) -> tuple[str, str | None]:
        text, stop = self._matcher.push(self._detokenizer.finish())
        return (text, stop) if stop is not None else (text + self._matcher.finish(), None)

    def _ending(self, reason: EndReason, stop_string: str | None) -> Ending:
        return Ending(reason, self._prompt_tokens, self._completion_tokens, stop_string)


async def merge_deltas(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several generations as they come, each with its generation's place. One failing fails all."""
    if len(generations) == 1:
        async for delta in generations[0].deltas():
            yield 0, delta
        return
    iterators = [generation.deltas() for generation in generations]
    tasks = {_next_delta(iterator): index for index, iterator in enumerate(iterators)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda finished: tasks[finished]):
                index = tasks.pop(task)
                delta = task.result()
                if not isinstance(delta, Ending):
                    tasks[_next_delta(iterators[index])] = index
                yield index, delta
    finally:
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)


def _next_delta(deltas: AsyncIterator[Delta]) -> asyncio.Task[Delta]:
    async def take() -> Delta:
        return await anext(deltas)

    return asyncio.create_task(take())


async def close_generations(generations: Sequence[Generation]) -> None:
    for generation in generations:
        await generation.aclose()


def _end_reason(output: Output) -> EndReason:
    assert output.finish in ("stop", "length", "timeout"), "other endings were raised"
    return output.finish


class Pipeline:
    """From internal requests to running generations. One event loop; text work may run in the executor."""

    def __init__(self, engine: EngineClient, text: ModelText, config: HttpConfig, executor: Executor) -> None:
        self._engine = engine
        self._text = text
        self._config = config
        self._executor = executor
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Requests submitted and not yet taken by the engine."""
        return self._num_waiting

    async def start(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Render, tokenise, check and submit all requests or none, and return when the engine took them.

        Raises NotReadyError, QueueFullError, InvalidRequestError, PromptTooLongError, TemplateError, RequestTimeoutError
        and EngineFailedError; nothing then stays behind in the engine.
        """
        self._check_room(len(requests))  # before the work of tokenising
        prompts = [await self._encode(request.prompt) for request in requests]
        submits = [self._to_submit(request, ids) for request, ids in zip(requests, prompts, strict=True)]
        self._check_room(len(requests))
        generations: list[Generation] = []
        try:
            for request, submit in zip(requests, submits, strict=True):
                stream = self._engine.submit(submit)
                generations.append(Generation(stream, self._text, request, len(submit.token_ids)))
            await self._wait_admitted(generations)
        except BaseException:
            await close_generations(generations)
            raise
        return generations

    async def _wait_admitted(self, generations: Sequence[Generation]) -> None:
        waiting = len(generations)
        self._num_waiting += waiting
        try:
            for generation in generations:
                await generation.wait_admitted()
                self._num_waiting -= 1
                waiting -= 1
        finally:
            self._num_waiting -= waiting

    def _check_room(self, num_requests: int) -> None:
        if self._engine.state != "ready":
            raise NotReadyError(f"the model is not ready: the engine is {self._engine.state}")
        depth = self._config.max_queue_depth
        if depth and num_requests > depth:
            raise InvalidRequestError(
                f"{num_requests} prompts in one request, at most {depth} may wait (--max-queue-depth)"
            )
        if depth and self._num_waiting + num_requests > depth:
            raise QueueFullError(
                f"{self._num_waiting} requests wait, the limit is {depth} (--max-queue-depth); try again later"
            )

    async def _encode(self, prompt: ChatPrompt | TextPrompt | TokenPrompt) -> list[int]:
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        if prompt.num_characters() <= INLINE_CHARACTERS:
            return encode_prompt(self._text, prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, encode_prompt, self._text, prompt)

    def _to_submit(self, request: GenerationRequest, token_ids: list[int]) -> Submit:
        """Check lengths and ids against the model and make the engine's frame."""
        ready = self._engine.ready
        context = self._config.max_model_len if ready is None else min(self._config.max_model_len, ready.max_model_len)
        room = context - len(token_ids)
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens, expected at least one", param=_prompt_param(request))
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the context is {context} (--max-seq-len) "
                "and must hold one new token too",
                param=_prompt_param(request),
            )
        if ready is not None:
            _check_ids(token_ids, ready.vocab_size, _prompt_param(request))
            _check_ids(request.stop_token_ids, ready.vocab_size, "stop_token_ids")
        eos = () if request.ignore_eos else self._text.eos_token_ids
        ceiling = min(self._config.max_output_tokens, room)
        max_tokens = ceiling if request.max_tokens is None else min(request.max_tokens, ceiling)
        return Submit(
            request_id=self._engine.new_request_id(),
            token_ids=token_ids,
            max_tokens=max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            min_p=request.sampling.min_p,
            seed=request.sampling.seed,
            stop_token_ids=sorted({*eos, *request.stop_token_ids}),
            min_tokens=min(request.min_tokens, max_tokens),
            deadline_s=_remaining(request),
        )


def encode_prompt(text: ModelText, prompt: ChatPrompt | TextPrompt) -> list[int]:
    """A chat template writes BOS itself; a plain prompt gets what the tokenizer puts in front.

    Raises TemplateError when the template refuses the conversation, InvalidRequestError when there is no template.
    """
    if isinstance(prompt, TextPrompt):
        return text.tokenizer.encode(prompt.text, add_special=True)
    if text.chat_template is None:
        raise InvalidRequestError(
            "the model has no chat template; use /v1/completions or start the server with --chat-template",
            param="messages",
        )
    rendered = text.chat_template.render(
        prompt.messages, add_generation_prompt=prompt.add_generation_prompt, **prompt.template_kwargs
    )
    return text.tokenizer.encode(rendered, add_special=False)


def _prompt_param(request: GenerationRequest) -> str:
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"


def _check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{param} has token id {wrong}, the vocabulary is 0 to {vocab_size - 1}", param=param)


def _remaining(request: GenerationRequest) -> float:
    """Seconds left of the request's time; 0 = no limit."""
    if not request.timeout_s:
        return 0.0
    remaining = request.received + request.timeout_s - time.monotonic()
    if remaining <= 0:
        raise RequestTimeoutError("the request's time ran out before it reached the engine")
    return remaining
