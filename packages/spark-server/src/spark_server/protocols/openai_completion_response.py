"""OpenAI's legacy completions: the deltas' way back. A whole answer is collected from the choices of stream chunks."""

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from spark_server.protocols.openai_completion_request import CompletionShape
from spark_server.protocols.openai_logprobs import LegacyLogprobs, LegacyWriter, join_legacy, shown_tokens
from spark_server.protocols.openai_response import DONE_FRAME, ResponseHead, Usage, UsageMeter, encode_frame
from spark_server.request import Delta, Ending, EndReason, PromptDelta, ToolCallDelta


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: LegacyLogprobs | None = None
    finish_reason: EndReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk of one. `usage` is absent from chunks unless the client asked for it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class CompletionAnswer:
    """One response while it is made. `push` gives the chunks' choices and remembers them for `completion`."""

    def __init__(
        self, head: ResponseHead, shape: CompletionShape, prompts: Sequence[Sequence[int]], *, keeps: bool = True
    ) -> None:
        """prompts: the ids of each prompt. keeps: `completion` will be asked for."""
        self._head = head
        self._shape = shape
        self._keeps = keeps
        self._prompts = prompts
        self._meter = UsageMeter([len(ids) for ids in prompts], shape.num_choices)
        num_choices = len(prompts) * shape.num_choices
        self._writers = [LegacyWriter() for _ in range(num_choices)]
        self._collected: list[list[Choice]] = [[] for _ in range(num_choices)]

    def push(self, index: int, delta: Delta) -> Choice | None:
        """None: there is nothing to send."""
        if self._shape.hides_answer and not isinstance(delta, PromptDelta):
            if not isinstance(delta, Ending):
                return None
            delta = replace(delta, reason="length", completion_tokens=0, reasoning_tokens=0, tokens=())
        self._meter.push(index, delta)
        choice = self._choice(index, delta)
        if self._keeps:
            self._collected[index].append(choice)
        return choice

    def _choice(self, index: int, delta: Delta) -> Choice:
        ids = [] if isinstance(delta, PromptDelta) else [token.id for token in delta.tokens]
        return Choice(
            text="" if isinstance(delta, Ending | ToolCallDelta) else delta.text,
            index=index,
            logprobs=self._logprobs(index, delta) if self._shape.with_logprobs else None,
            finish_reason=delta.reason if isinstance(delta, Ending) else None,
            token_ids=ids if ids and self._shape.with_token_ids else UNSET,
        )

    def _logprobs(self, index: int, delta: Delta) -> LegacyLogprobs | None:
        writer = self._writers[index]
        if isinstance(delta, PromptDelta):
            return writer.write_prompt(delta)
        tokens = shown_tokens(delta) if isinstance(delta, Ending) else delta.tokens
        return writer.write(tokens) if tokens else None

    def chunk(self, choices: list[Choice]) -> Completion:
        """No choices: the chunk with the usage."""
        usage: Usage | UnsetType | None = UNSET
        if self._shape.include_usage:
            usage = self._meter.so_far() if self._shape.count_usage else None
            usage = usage if choices else self._meter.total()
        return self._completion(choices, usage)

    def completion(self) -> Completion:
        """The whole answer, when every choice ended."""
        choices = [self._collect(index, pieces) for index, pieces in enumerate(self._collected)]
        return self._completion(choices, self._meter.total())

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=usage,
        )

    def _collect(self, index: int, pieces: Sequence[Choice]) -> Choice:
        ids = [token_id for piece in pieces if piece.token_ids is not UNSET for token_id in piece.token_ids]
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        reasons = [piece.finish_reason for piece in pieces if piece.finish_reason is not None]
        prompt_ids = list(self._prompts[index // self._shape.num_choices])
        return Choice(
            text="".join(piece.text for piece in pieces),
            index=index,
            logprobs=join_legacy(logprobs) if self._shape.with_logprobs else None,
            finish_reason=reasons[-1],
            token_ids=ids if self._shape.with_token_ids else UNSET,
            prompt_token_ids=prompt_ids if self._shape.with_token_ids else UNSET,
        )


async def collect_completion(answer: CompletionAnswer, deltas: AsyncIterable[tuple[int, Delta]]) -> Completion:
    async for index, delta in deltas:
        answer.push(index, delta)
    return answer.completion()


async def stream_completion(
    answer: CompletionAnswer, deltas: AsyncIterable[tuple[int, Delta]], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream: what comes of each choice, its finish reason, the usage if asked for, the end mark."""
    async for index, delta in deltas:
        choice = answer.push(index, delta)
        if choice is not None:
            yield encode_frame(answer.chunk([choice]))
    if include_usage:
        yield encode_frame(answer.chunk([]))
    yield DONE_FRAME
