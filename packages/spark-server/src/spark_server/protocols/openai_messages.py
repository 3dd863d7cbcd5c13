"""Messages of chat completions: what clients send, and what assistant messages echo of our own answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from spark_server.errors import InvalidRequestError
from spark_server.messages import ToolCall, assistant_message, system_message, tool_message, user_message

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments` is JSON text; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """Other keys (audio, annotations, …) are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None


def lower_message(place: int, message: ChatMessage) -> dict[str, Any]:
    """The message as a template takes it. Raises InvalidRequestError with the path of what is wrong."""
    where = f"messages[{place}]"
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role: got '{message.role}', expected one of {', '.join(sorted(ROLES))}", param=f"{where}.role"
        )
    if message.content is None and message.role in ("system", "developer", "user"):
        raise InvalidRequestError(
            f"{where}.content: a {message.role} message needs content, got none", param=f"{where}.content"
        )
    text = _join_parts(where, message.content)
    match message.role:
        case "system" | "developer":
            return system_message(text)
        case "user":
            return user_message(text, name=message.name)
        case "assistant":
            return _lower_assistant(where, message, text)
        case "tool" if message.tool_call_id is None:
            raise InvalidRequestError(
                f"{where}.tool_call_id: a tool message needs the id of its call, got none", f"{where}.tool_call_id"
            )
        case _:
            return tool_message(message.tool_call_id or "", text, name=message.name)


def _lower_assistant(where: str, message: ChatMessage, text: str) -> dict[str, Any]:
    reasoning = next((said for said in (message.reasoning_content, message.reasoning) if isinstance(said, str)), None)
    calls = [_lower_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(message.tool_calls or [])]
    if message.function_call is not None:
        calls.append(_create_call("", message.function_call))
    return assistant_message(text or message.refusal or "", reasoning=reasoning, tool_calls=calls, name=message.name)


def _lower_call(where: str, call: MessageToolCall) -> ToolCall:
    if call.type not in (None, "function") or call.function is None:
        raise InvalidRequestError(
            f"{where}: '{call.type}' calls are not available in this build, only 'function'", where, "unsupported_tool"
        )
    return _create_call(call.id or "", call.function)


def _create_call(call_id: str, function: CalledFunction) -> ToolCall:
    arguments = function.arguments
    text = msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""
    return ToolCall(call_id, function.name, text)


def _join_parts(where: str, content: str | Sequence[ContentPart] | None) -> str:
    """Text parts become one string, a line each, and none an empty one: most templates take nothing but a string."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        path = f"{where}.content[{place}]"
        if part.type not in ("text", "refusal"):
            raise InvalidRequestError(
                f"{path}: '{part.type}' parts are not available in this build, only 'text'",
                param=path,
                code="unsupported_content",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise InvalidRequestError(f"{path}: a '{part.type}' part needs the key '{part.type}'", param=path)
        texts.append(text)
    return "\n".join(texts)
