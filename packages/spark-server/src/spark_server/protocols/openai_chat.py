"""OpenAI's chat completions: the body, its way to the internal request, and the deltas' way back."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.openai_body import UNAVAILABLE, OpenAiBody, lower_body, refuse_unavailable
from spark_server.protocols.openai_response import (
    DONE_FRAME,
    SYSTEM_FINGERPRINT,
    ResponseHead,
    Usage,
    encode_frame,
    sum_usage,
)
from spark_server.request import ChatPrompt, Delta, Ending, EndReason, GenerationRequest, TextDelta

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

# The arguments of ChatTemplate.render, which template variables from a client may not take the place of.
RESERVED_TEMPLATE_KWARGS = ("messages", "tools", "self")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """A message as clients send it; what an assistant message echoes of our own answers is accepted."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(OpenAiBody, frozen=True, kw_only=True):
    """`messages` has no default, so leaving it out is a wrong body."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None


CHAT_UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    **UNAVAILABLE,
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value in ([], ["text"]),
}


def lower_chat(body: ChatBody, config: HttpConfig) -> GenerationRequest:
    """Raises InvalidRequestError naming the field that is wrong or not available."""
    refuse_unavailable(body, CHAT_UNAVAILABLE)
    if not body.messages:
        raise InvalidRequestError("Invalid 'messages': the array is empty, expected at least one message.", "messages")
    prompt = ChatPrompt(
        messages=[_lower_message(index, message) for index, message in enumerate(body.messages)],
        template_kwargs=_template_kwargs(body, config),
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequestError(
                f"'max_tokens' is {body.max_tokens} and 'max_completion_tokens' is {body.max_completion_tokens}; "
                "they mean the same, send one",
                param="max_tokens",
            )
        return lower_body(
            body, prompt, config, max_tokens=body.max_completion_tokens, max_tokens_name="max_completion_tokens"
        )
    return lower_body(body, prompt, config, max_tokens=body.max_tokens)


def _template_kwargs(body: ChatBody, config: HttpConfig) -> dict[str, Any]:
    """The server's variables, then the request's short forms, then the request's own object."""
    kwargs = dict(config.chat_template_kwargs)
    if body.enable_thinking is not None:
        kwargs["enable_thinking"] = body.enable_thinking
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    kwargs.update(body.chat_template_kwargs or {})
    kwargs.pop("add_generation_prompt", None)
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in kwargs:
            raise InvalidRequestError(
                f"Invalid 'chat_template_kwargs': '{name}' belongs to the request itself.", "chat_template_kwargs"
            )
    if config.disable_thinking:
        kwargs["enable_thinking"] = False
    return kwargs


def _lower_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """The message as a template takes it: content as one string, the developer as the system, other absent keys absent."""
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"messages[{index}].role: got '{message.role}', expected one of {', '.join(sorted(ROLES))}",
            param=f"messages[{index}].role",
        )
    if message.content is None and message.role in ("system", "developer", "user"):
        raise InvalidRequestError(
            f"messages[{index}].content: a {message.role} message needs content, got none",
            param=f"messages[{index}].content",
        )
    lowered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _lower_content(index, message.content),
    }
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            lowered[name] = value
    if message.tool_calls is not None:
        lowered["tool_calls"] = [_lower_tool_call(call) for call in message.tool_calls]
    return lowered


def _lower_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object: on the wire they are JSON text, but most templates walk through them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        return call  # a model's broken call goes back to it as it was
    return {**call, "function": {**function, "arguments": arguments}}


def _lower_content(index: int, content: str | Sequence[ContentPart] | None) -> str:
    """Text parts become one string, a line each, and none an empty one: most templates take nothing but a string."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        where = f"messages[{index}].content[{place}]"
        if part.type not in ("text", "refusal"):
            raise InvalidRequestError(
                f"{where}: '{part.type}' parts are not available in this build, only 'text'",
                param=where,
                code="unsupported_content",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise InvalidRequestError(f"{where}: a '{part.type}' part needs the key '{part.type}'", param=where)
        texts.append(text)
    return "\n".join(texts)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None
    annotations: list[Any] = []


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: Message
    logprobs: None = None
    finish_reason: EndReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[Choice]
    usage: Usage


class ChunkDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: EndReason | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is absent unless the client asked for it; then it is null in every chunk but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


async def raise_completion(head: ResponseHead, deltas: AsyncIterable[Delta]) -> ChatCompletion:
    """Collect a whole answer."""
    texts: list[str] = []
    endings: list[Ending] = []
    async for delta in deltas:
        if isinstance(delta, TextDelta):
            texts.append(delta.text)
        elif isinstance(delta, Ending):
            endings.append(delta)
    choice = Choice(message=Message(content="".join(texts)), finish_reason=endings[0].reason)
    return ChatCompletion(
        id=head.id, created=head.created, model=head.model, choices=[choice], usage=sum_usage(endings)
    )


async def raise_chunks(
    head: ResponseHead, deltas: AsyncIterable[Delta], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream: the role, the text, the finish reason, the usage if asked for, the end mark."""
    unused = None if include_usage else UNSET

    def frame(choices: list[ChunkChoice], usage: Usage | UnsetType | None = unused) -> bytes:
        return encode_frame(
            ChatCompletionChunk(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage)
        )

    yield frame([ChunkChoice(delta=ChunkDelta(role="assistant", content=""))])
    async for delta in deltas:
        if isinstance(delta, TextDelta):
            yield frame([ChunkChoice(delta=ChunkDelta(content=delta.text))])
            continue
        if not isinstance(delta, Ending):
            continue
        yield frame([ChunkChoice(delta=ChunkDelta(), finish_reason=delta.reason)])
        if include_usage:
            yield frame([], sum_usage([delta]))
    yield DONE_FRAME
