"""Conversations for templates: where system messages may stand, and how earlier answers look."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from spark_model.chat_template import ChatTemplate
from spark_server.messages import (
    Message,
    SystemPlaces,
    ToolCall,
    assistant_message,
    find_system_places,
    fit_template,
    place_systems,
    system_message,
    tool_message,
    user_message,
)

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
REFUSES_LATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LOSES_LATE = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
MOVES_LATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
REFUSES_ALL = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)

CONVERSATION = [
    system_message("one"),
    user_message("hi"),
    assistant_message("ho"),
    system_message("two"),
    user_message("bye"),
]


@pytest.mark.parametrize(
    ("source", "places", "rendered"),
    [
        (LOOP, "anywhere", "<system>one<user>hi<assistant>ho<system>two<user>bye"),
        (REFUSES_LATE, "first", "<system>one\n\ntwo<user>hi<assistant>ho<user>bye"),
        (LOSES_LATE, "first", "<system>one\n\ntwo<user>hi<assistant>ho<user>bye"),
        (MOVES_LATE, "first", "one\n\ntwo<user>hi<assistant>ho<user>bye"),
        (REFUSES_ALL, "nowhere", "<user>one\n\ntwo\n\nhi<assistant>ho<user>bye"),
    ],
)
def test_fit_template(source: str, places: SystemPlaces, rendered: str) -> None:
    template = fit_template(ChatTemplate(source))
    assert template.places == places
    assert template.render(CONVERSATION) == rendered
    assert template.render(CONVERSATION[1:3]) == "<user>hi<assistant>ho"


def test_find_system_places_of_a_template_that_wants_turns_to_alternate() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + LOOP
    )
    assert find_system_places(ChatTemplate(source)) == "anywhere"


def test_fit_template_hands_everything_else_on() -> None:
    class Spy:
        def render(
            self,
            messages: Sequence[Message],
            *,
            tools: Sequence[Mapping[str, Any]] | None = None,
            add_generation_prompt: bool = True,
            **kwargs: Any,
        ) -> str:
            return repr((messages, tools, add_generation_prompt, kwargs))

    tools = [{"type": "function"}]
    rendered = fit_template(Spy()).render([user_message("x")], tools=tools, add_generation_prompt=False, a=1)
    assert rendered == repr(([user_message("x")], tools, False, {"a": 1}))


def test_place_systems_leaves_what_fits_as_it_is() -> None:
    fitting = CONVERSATION[:3]
    assert place_systems(fitting, "first") is fitting
    assert place_systems(CONVERSATION[1:3], "nowhere") == CONVERSATION[1:3]
    assert place_systems(CONVERSATION[2:4], "nowhere") == [user_message("two"), assistant_message("ho")]
    assert place_systems(CONVERSATION, "nowhere")[2] is CONVERSATION[4]


def test_messages_have_only_keys_that_say_something() -> None:
    assert user_message("x") == {"role": "user", "content": "x"}
    assert user_message("x", name="ada") == {"role": "user", "content": "x", "name": "ada"}
    assert tool_message("c", "42") == {"role": "tool", "content": "42", "tool_call_id": "c"}
    assert assistant_message("x", reasoning="") == {"role": "assistant", "content": "x"}
    assert assistant_message("", reasoning="hm") == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"x": [1, "é"]}', {"x": [1, "é"]}), ("", {}), ('{"x": [1', '{"x": [1'), ("3", "3"), ("[" * 5000, "[" * 5000)],
)
def test_assistant_message_gives_templates_arguments_to_walk_through(text: str, arguments: Any) -> None:
    [call] = assistant_message("", tool_calls=[ToolCall("c", "f", text)])["tool_calls"]
    assert call == {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
