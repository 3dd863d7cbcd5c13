"""OpenAI's chat completions: the deltas' way back.

Deltas become the choices of stream chunks, and a whole answer is collected from those, so that both say the same.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from spark_server.protocols.openai_chat_request import ChatShape
from spark_server.protocols.openai_logprobs import ChoiceLogprobs, chat_logprobs, shown_tokens
from spark_server.protocols.openai_response import DONE_FRAME, ResponseHead, Usage, UsageMeter, encode_frame
from spark_server.request import Delta, Ending, EndReason, ReasoningDelta, TextDelta, Token, ToolCallDelta, ToolChoice

FinishReason = EndReason | Literal["tool_calls"]


class FunctionPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPiece


class ChunkDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is absent unless the client asked for it; then it is null in every chunk but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null where there is nothing but tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Any] = []
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    metadata: Mapping[str, Any] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatAnswer:
    """One response while it is made. `push` gives the chunks' choices and remembers them for `completion`."""

    def __init__(
        self, head: ResponseHead, shape: ChatShape, prompt_ids: Sequence[int], num_choices: int, *, keeps: bool = True
    ) -> None:
        """keeps: `completion` will be asked for."""
        self._head = head
        self._shape = shape
        self._keeps = keeps
        self._meter = UsageMeter([len(prompt_ids)], num_choices)
        self._prompt_ids = list(prompt_ids) if shape.with_token_ids else UNSET
        self._collected: list[list[ChunkChoice]] = [[] for _ in range(num_choices)]

    def start(self) -> list[ChunkChoice]:
        """The chunks that begin each choice."""
        role = ChunkDelta(role="assistant", content="")
        return [ChunkChoice(index=index, delta=role) for index in range(len(self._collected))]

    def push(self, index: int, delta: Delta) -> list[ChunkChoice]:
        self._meter.push(index, delta)
        choices = [self._choice(index, delta, piece) for piece in _pieces(delta)[:1]]
        choices += [ChunkChoice(index=index, delta=piece) for piece in _pieces(delta)[1:]]
        if self._keeps:
            self._collected[index] += choices
        return choices

    def _choice(self, index: int, delta: Delta, piece: ChunkDelta) -> ChunkChoice:
        tokens = shown_tokens(delta) if isinstance(delta, Ending) else delta.tokens
        ids = [token.id for token in delta.tokens]
        return ChunkChoice(
            index=index,
            delta=piece,
            logprobs=self._logprobs(tokens),
            finish_reason=choose_finish_reason(delta, self._shape.tool_choice) if isinstance(delta, Ending) else None,
            token_ids=ids if ids and self._shape.with_token_ids else UNSET,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> ChoiceLogprobs | None:
        return chat_logprobs(tokens) if tokens and self._shape.with_logprobs else None

    def chunk(self, choices: list[ChunkChoice], *, is_first: bool = False) -> ChatCompletionChunk:
        """No choices: the chunk with the usage."""
        return ChatCompletionChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
            usage=self._chunk_usage(is_last=not choices),
            service_tier=self._shape.service_tier or UNSET,
            prompt_token_ids=self._prompt_ids if is_first else UNSET,
        )

    def _chunk_usage(self, *, is_last: bool) -> Usage | UnsetType | None:
        if not self._shape.include_usage:
            return UNSET
        if is_last:
            return self._meter.total()
        return self._meter.so_far() if self._shape.count_usage else None

    def completion(self) -> ChatCompletion:
        """The whole answer, when every choice ended."""
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=[self._collect(index, chunks) for index, chunks in enumerate(self._collected)],
            usage=self._meter.total(),
            metadata=UNSET if self._shape.metadata is None else self._shape.metadata,
            service_tier=self._shape.service_tier or UNSET,
            prompt_token_ids=self._prompt_ids,
        )

    def _collect(self, index: int, chunks: Sequence[ChunkChoice]) -> Choice:
        logprobs = [token for chunk in chunks if chunk.logprobs is not None for token in chunk.logprobs.content]
        reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]
        ids = [token_id for chunk in chunks if chunk.token_ids is not UNSET for token_id in chunk.token_ids]
        return Choice(
            index=index,
            message=_collect_message([chunk.delta for chunk in chunks]),
            logprobs=ChoiceLogprobs(logprobs) if self._shape.with_logprobs else None,
            finish_reason=reasons[-1],
            token_ids=ids if self._shape.with_token_ids else UNSET,
        )


def choose_finish_reason(ending: Ending, tool_choice: ToolChoice) -> FinishReason:
    """A named function is what the client asked for, so its call ends with "stop"; "timeout" is a value of our own."""
    if ending.reason == "stop" and ending.num_tool_calls and tool_choice.mode != "named":
        return "tool_calls"
    return ending.reason


def _pieces(delta: Delta) -> list[ChunkDelta]:
    """A call begins with a chunk of its own, whose arguments are empty."""
    match delta:
        case TextDelta(text=text):
            return [ChunkDelta(content=text)]
        case ReasoningDelta(text=text):
            return [ChunkDelta(reasoning_content=text)]
        case ToolCallDelta(index=index, arguments=arguments, id=call_id, name=name):
            pieces: list[ToolCallPiece] = []
            if name is not None:
                function = FunctionPiece(name, "")
                pieces.append(ToolCallPiece(index=index, id=call_id or "", type="function", function=function))
            if arguments or name is None:
                pieces.append(ToolCallPiece(index=index, function=FunctionPiece(arguments=arguments)))
            return [ChunkDelta(tool_calls=[piece]) for piece in pieces]
        case Ending():
            return [ChunkDelta()]
    return []


def _collect_message(deltas: Sequence[ChunkDelta]) -> Message:
    text = "".join(delta.content for delta in deltas if delta.content is not UNSET)
    reasoning = "".join(delta.reasoning_content for delta in deltas if delta.reasoning_content is not UNSET)
    calls = _collect_calls([piece for delta in deltas if delta.tool_calls is not UNSET for piece in delta.tool_calls])
    return Message(
        content=text if text or not calls else None,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _collect_calls(pieces: Sequence[ToolCallPiece]) -> list[ToolCall]:
    starts = [piece for piece in pieces if piece.id is not UNSET]
    return [
        ToolCall(
            id=str(start.id),
            function=CalledFunction(
                start.function.name or "",
                "".join(piece.function.arguments or "" for piece in pieces if piece.index == start.index),
            ),
        )
        for start in starts
    ]


async def collect_chat(answer: ChatAnswer, deltas: AsyncIterable[tuple[int, Delta]]) -> ChatCompletion:
    async for index, delta in deltas:
        answer.push(index, delta)
    return answer.completion()


async def stream_chat(
    answer: ChatAnswer, deltas: AsyncIterable[tuple[int, Delta]], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream: a role for each choice, what comes, the finish reasons, the usage if asked for, the end."""
    is_first = True
    for choice in answer.start():
        yield encode_frame(answer.chunk([choice], is_first=is_first))
        is_first = False
    async for index, delta in deltas:
        for choice in answer.push(index, delta):
            yield encode_frame(answer.chunk([choice]))
    if include_usage:
        yield encode_frame(answer.chunk([]))
    yield DONE_FRAME
