"""A request at the engine: its outputs become deltas.

Text is known only here, so stop strings are found here; the engine knows ids.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import anyio

from spark_runtime.types import TokenLogprobs
from spark_server.answer_format import AnswerParser
from spark_server.engine.client import EngineStream
from spark_server.engine.frames import Output
from spark_server.errors import EngineFailedError, RequestTimeoutError, ServerError
from spark_server.request import (
    AnswerDelta,
    ChatPrompt,
    Delta,
    Ending,
    EndReason,
    GenerationRequest,
    PromptDelta,
    Token,
    ToolCallDelta,
)
from spark_server.stop_strings import StopMatcher


class Detokenizer(Protocol):
    """What is needed of spark_model.detokenizer.IncrementalDetokenizer; one for each choice."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Vocabulary(Protocol):
    """From ids to text.

    create_detokenizer   at_start: the text begins here, and does not go on from a prompt's
    """

    def create_detokenizer(self, *, at_start: bool, skip_special: bool) -> Detokenizer: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token spells, special tokens too."""


class Generation:
    """One request at the engine. Read `deltas` once; `aclose` frees its slot, however far it came."""

    def __init__(
        self,
        stream: EngineStream,
        vocabulary: Vocabulary,
        request: GenerationRequest,
        parser: AnswerParser,
        prompt_ids: Sequence[int],
    ) -> None:
        self._stream = stream
        self._outputs = stream.__aiter__()
        self._vocabulary = vocabulary
        self._request = request
        self._parser = parser
        self._prompt_ids = prompt_ids
        self._detokenizer = vocabulary.create_detokenizer(
            at_start=isinstance(request.prompt, ChatPrompt), skip_special=not request.shows_special
        )
        self._matcher = StopMatcher(request.stop_strings)
        self._wants_tokens = request.wants_tokens or request.sampling.num_logprobs is not None
        self._tokens: list[Token] = []
        self._end_tokens: list[Token] = []
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._tool_calls: set[int] = set()
        self._cached_tokens = 0
        self._first_token_at: float | None = None
        self._first: Output | None = None

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self._prompt_ids

    async def wait_admitted(self) -> None:
        """Return when the engine took the request. Raises what it refused or failed with."""
        self._first = await self._next_output()
        self._cached_tokens = self._first.cached_tokens

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every delta in order, one `Ending` last. Raises EngineFailedError, RequestTimeoutError or ServerError instead."""
        assert self._first is not None, "wait_admitted comes first"
        output = self._first
        if self._request.echo:
            prompt, output = await self._read_prompt(output)
            yield prompt
        while True:
            deltas, stop = self._show(output)
            if stop is None and output.finish is not None:
                tail, stop = self._finish()
                deltas += tail
            for delta in self._with_tokens(deltas):
                yield delta
            if stop is not None:
                await self.aclose()
                for delta in self._with_tokens(self._parser.finish()):
                    yield delta
                yield self._ending("stop", output, stop)
                return
            if output.finish is not None:
                for delta in self._with_tokens(self._parser.finish()):
                    yield delta
                yield self._ending(_end_reason(output), output, None)
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

    async def _read_prompt(self, output: Output) -> tuple[PromptDelta, Output]:
        """The prompt with the log probabilities that come before the first token, and the output that has that token."""
        logprobs: list[TokenLogprobs] = list(output.prompt_logprobs)
        if self._request.sampling.num_prompt_logprobs is not None:
            while not output.token_ids and output.finish is None:
                output = await self._next_output()
                logprobs += output.prompt_logprobs
        detokenizer = self._vocabulary.create_detokenizer(at_start=True, skip_special=not self._request.shows_special)
        text = detokenizer.push(self._prompt_ids) + detokenizer.finish()
        tokens = [self._token(self._prompt_ids[0], None)]
        found = iter(logprobs)
        tokens += [self._token(token_id, next(found, None)) for token_id in self._prompt_ids[1:]]
        return PromptDelta(text, tuple(tokens)), output

    def _token(self, token_id: int, logprobs: TokenLogprobs | None) -> Token:
        spell = self._vocabulary.token_bytes
        if logprobs is None:
            return Token(token_id, spell(token_id))
        top = tuple((other, spell(other), logprob) for other, logprob in logprobs.top)
        return Token(token_id, spell(token_id), logprobs.logprob, top)

    def _show(self, output: Output) -> tuple[list[AnswerDelta], str | None]:
        """What one output says, token by token: tokens after the one that completes a stop string do not count."""
        if output.token_ids and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        hidden = 1 if output.stop_token_id is not None and not self._request.shows_special else 0
        num_shown = len(output.token_ids) - hidden
        deltas: list[AnswerDelta] = []
        for place, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[place] if output.logprobs else None
            if place >= num_shown:
                self._count(token_id, logprobs, self._end_tokens)
                break
            self._count(token_id, logprobs, self._tokens)
            text, stop = self._find_stop(self._detokenizer.push([token_id]))
            deltas += self._read(text)
            if stop is not None:
                return deltas, stop
        return deltas, None

    def _count(self, token_id: int, logprobs: TokenLogprobs | None, tokens: list[Token]) -> None:
        self._completion_tokens += 1
        self._reasoning_tokens += self._parser.is_reasoning
        if self._wants_tokens:
            tokens.append(self._token(token_id, logprobs))

    def _find_stop(self, piece: str) -> tuple[str, str | None]:
        """The text to show now and the stop string that ended it."""
        if self._completion_tokens < self._request.min_tokens:
            return piece, None
        text, stop = self._matcher.push(piece)
        return (text + stop if stop is not None and self._request.include_stop else text), stop

    def _finish(self) -> tuple[list[AnswerDelta], str | None]:
        text, stop = self._find_stop(self._detokenizer.finish())
        return self._read(text if stop is not None else text + self._matcher.finish()), stop

    def _read(self, text: str) -> list[AnswerDelta]:
        deltas = self._parser.push(text) if text else []
        self._tool_calls.update(delta.index for delta in deltas if isinstance(delta, ToolCallDelta))
        return deltas

    def _with_tokens(self, deltas: Iterable[AnswerDelta]) -> Iterator[AnswerDelta]:
        """Neighbours of one kind joined, the tokens that came with them on the first."""
        for delta in _join(deltas):
            if isinstance(delta, ToolCallDelta):
                self._tool_calls.add(delta.index)
            if self._tokens:
                delta = replace(delta, tokens=tuple(self._tokens))
                self._tokens.clear()
            yield delta

    def _ending(self, reason: EndReason, output: Output, stop_string: str | None) -> Ending:
        received = self._request.received
        return Ending(
            reason,
            len(self._prompt_ids),
            self._completion_tokens,
            stop_string=stop_string,
            stop_token_id=None if stop_string is not None else output.stop_token_id,
            num_tool_calls=len(self._tool_calls),
            cached_tokens=self._cached_tokens,
            reasoning_tokens=self._reasoning_tokens,
            ttft_s=0.0 if self._first_token_at is None else self._first_token_at - received,
            generation_s=time.monotonic() - received,
            tokens=(*self._tokens, *self._end_tokens),
        )


def _join(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """One delta for neighbours that say the same kind of thing."""
    joined: list[AnswerDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, ToolCallDelta):
            if isinstance(last, ToolCallDelta) and last.index == delta.index and delta.name is None:
                joined[-1] = replace(last, arguments=last.arguments + delta.arguments)
            else:
                joined.append(delta)
        elif last is not None and not isinstance(last, ToolCallDelta) and type(last) is type(delta):
            joined[-1] = replace(last, text=last.text + delta.text)
        else:
            joined.append(delta)
    return joined


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
