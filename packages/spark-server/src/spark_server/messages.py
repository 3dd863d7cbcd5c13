"""Conversations as chat templates take them, whatever protocol they came in.

Protocols make their messages with the functions here. `fit_template` then looks after templates that refuse or lose
system messages which stand late, or more than one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from spark_model.errors import TemplateError

Message = Mapping[str, Any]
SystemPlaces = Literal["anywhere", "first", "nowhere"]


class ChatTemplate(Protocol):
    """What is needed of spark_model.chat_template.ChatTemplate. Called from several threads."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made in an earlier turn. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


def system_message(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user_message(text: str, *, name: str | None = None) -> dict[str, Any]:
    return {"role": "user", "content": text, **({} if name is None else {"name": name})}


def assistant_message(
    text: str, *, reasoning: str | None = None, tool_calls: Sequence[ToolCall] = (), name: str | None = None
) -> dict[str, Any]:
    """An earlier answer; keys that have nothing to say are absent, since templates ask whether they are defined."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if name is not None:
        message["name"] = name
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [_template_call(call) for call in tool_calls]
    return message


def tool_message(call_id: str, text: str, *, name: str | None = None) -> dict[str, Any]:
    message = {"role": "tool", "content": text, "tool_call_id": call_id}
    return message if name is None else {**message, "name": name}


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object, since most templates walk through them; a broken call goes back as it was."""
    try:
        decoded = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    arguments = decoded if isinstance(decoded, dict) else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class FittedTemplate:
    """A template that gets system messages where it can take them; elsewhere they are merged into the first place."""

    def __init__(self, template: ChatTemplate, places: SystemPlaces) -> None:
        self._template = template
        self.places = places

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        fitted = place_systems(messages, self.places)
        return self._template.render(fitted, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)


def fit_template(template: ChatTemplate) -> FittedTemplate:
    """Find out by rendering where the template takes system messages, once."""
    return FittedTemplate(template, find_system_places(template))


def find_system_places(template: ChatTemplate) -> SystemPlaces:
    """A place counts if the template takes a message there without complaint, shows it whole and keeps the order."""
    late = [
        system_message("Mark-1."),
        user_message("Mark-2."),
        assistant_message("Mark-3."),
        system_message("Mark-4."),
        user_message("Mark-5."),
    ]
    if _shows_all(template, late):
        return "anywhere"
    return "first" if _shows_all(template, late[:2]) else "nowhere"


def _shows_all(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    try:
        text = template.render(messages)
    except TemplateError:
        return False
    places = [text.find(message["content"]) for message in messages]
    return -1 not in places and places == sorted(places)


def place_systems(messages: Sequence[Message], places: SystemPlaces) -> Sequence[Message]:
    """The conversation with its system messages in a place that the template takes, in their order.

    "first" makes them one message at the beginning, "nowhere" the beginning of the first user message.
    """
    texts = [str(message.get("content", "")) for message in messages if message.get("role") == "system"]
    if places == "anywhere" or not texts:
        return messages
    if places == "first" and len(texts) == 1 and messages[0].get("role") == "system":
        return messages
    text = "\n\n".join(texts)
    others = [message for message in messages if message.get("role") != "system"]
    if places == "first":
        return [system_message(text), *others]
    for place, message in enumerate(others):
        if message.get("role") == "user":
            others[place] = {**message, "content": f"{text}\n\n{message.get('content', '')}"}
            return others
    return [user_message(text), *others]
