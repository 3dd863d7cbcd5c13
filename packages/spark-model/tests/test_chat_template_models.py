"""Every template of the test data renders every conversation as the Jinja2 that transformers sets up."""

import datetime
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from spark_model import chat_template
from spark_model.chat_template import ChatTemplate
from spark_model.errors import TemplateError

Message = dict[str, Any]


class FrozenClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "FrozenClock":
        return cls(2025, 3, 9, 13, 5, 7, tzinfo=tz)


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "datetime", FrozenClock)
    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)


def tool(name: str, description: str, properties: Message, required: list[str]) -> Message:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CITY: Message = {"type": "string", "description": "Città"}
TOOL_SETS: dict[str, list[Message] | None] = {
    "": None,
    "+tools": [
        tool(
            "get_weather",
            'Weather of a <city> & its "surroundings"',
            {"city": CITY, "days": {"type": "integer", "description": "1 or 2", "enum": [1, 2]}},
            ["city"],
        ),
        tool("now", "The time", {}, []),
    ],
    "+rich": [
        tool(
            "search",
            "Search\nthe web",
            {
                "city": CITY,
                "units": {"type": ["string", "null"], "default": "C"},
                "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]},
                "items": {"type": "array", "items": {"type": "number", "minimum": 1.0}},
                "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            },
            ["city", "items"],
        )
    ],
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Hi"}
ASSISTANT: Message = {"role": "assistant", "content": "Hello!"}
ARGUMENTS = {"city": "Köln", "days": 2, "scale": 20.0, "tiny": 1e-7, "deep": {"x": [1, 2.5, None, True]}}


def call(arguments: object, number: int = 1) -> Message:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(content: object, number: int = 1) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": content}


CONVERSATIONS: dict[str, list[Message]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "and?"}],
    "ends_with_assistant": [USER, ASSISTANT, USER, ASSISTANT],
    "tool_call": [USER, {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)]}, result('{"t": 20}')],
    "tool_call_none": [
        *(SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}, result("20")),
        *(ASSISTANT, USER),
    ],
    "tool_call_no_content": [USER, {"role": "assistant", "tool_calls": [call({})]}, result("20")],
    "tool_calls_two": [
        *(USER, {"role": "assistant", "content": "x", "tool_calls": [call({"city": "A"}), call({"city": "B"}, 2)]}),
        *(result("20"), result("21", 2)),
    ],
    "tool_call_text_arguments": [
        *(USER, {"role": "assistant", "content": "", "tool_calls": [call('{"city": "Köln"}')]}, result("20")),
    ],
    "empty": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "unicode": [{"role": "user", "content": "wörld 你好 🙂 <b>&\"'</b>\n\n  x\t"}, ASSISTANT, USER],
    "reasoning": [USER, {"role": "assistant", "content": "42", "reasoning_content": "think\nhard"}, USER],
    "reasoning_last": [
        *(USER, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call({"city": "A"})]}),
        result("20"),
    ],
    "think_tags": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n42"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}],
    "content_none": [SYSTEM, USER, {"role": "assistant", "content": None}, USER],
    "developer": [{"role": "developer", "content": "dev"}, USER],
    "assistant_first": [ASSISTANT, USER],
    "unknown_role": [{"role": "narrator", "content": "x"}, USER],
    "nothing": [],
}
THINKING: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})


def template_directory() -> Path:
    if "SPARK_TEST_DATA" not in os.environ:
        pytest.skip("SPARK_TEST_DATA is not set")
    directory = Path(os.environ["SPARK_TEST_DATA"]) / "chat-templates"
    if not directory.is_dir():
        pytest.skip(f"{directory} does not exist")
    return directory


def template_names() -> list[str]:
    directory = Path(os.environ.get("SPARK_TEST_DATA", "/nonexistent")) / "chat-templates"
    return sorted(path.stem for path in directory.glob("*.jinja")) or ["none"]


def jinja(source: str, messages: object, **variables: object) -> str:
    compiled: Any = chat_template_utils._compile_jinja_template(source)
    text: str = compiled.render(messages=messages, **variables)
    return text


# Conversations that Jinja2 refuses. "both": refused here too. "ours": rendered here, because a loop over None runs zero
# times, where Jinja2 says that None is not iterable. "x*" stands for x with every tool set.
REFUSED: dict[str, dict[str, str]] = {
    "GLM-4.7-Flash": {
        "both": "tool_call_text_arguments*",
    },
    "HuggingFaceTB-SmolLM3-3B": {
        "both": "nothing*",
    },
    "Kimi-K2-Instruct": {
        "both": (
            "reasoning_last* tool_call* tool_call_no_content* tool_call_none* tool_call_text_arguments* tool_calls_two*"
        ),
    },
    "MiniMax-M2": {
        "both": "tool_call_text_arguments*",
    },
    "Mistral-Small-3.2-24B-Instruct-2506": {
        "both": "assistant_first* developer* unknown_role*",
        "ours": "content_none*",
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "both": "nothing* tool_call_text_arguments*",
    },
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": {
        "both": (
            "assistant_first+rich content_none* developer+rich empty+rich ends_with_assistant+rich "
            "nothing+rich parts* reasoning+rich reasoning_last+rich system+rich think_tags+rich "
            "tool_call+rich tool_call_no_content+rich tool_call_none+rich tool_call_text_arguments+rich "
            "tool_calls_two+rich turns+rich unicode+rich unknown_role+rich user+rich"
        ),
        "ours": (
            "assistant_first developer empty ends_with_assistant nothing reasoning reasoning_last system "
            "think_tags tool_call tool_call_no_content tool_call_none tool_call_text_arguments tool_calls_two "
            "turns unicode unknown_role user"
        ),
    },
    "Qwen-QwQ-32B": {
        "both": "content_none* nothing* parts* tool_call_no_content* tool_call_none*",
    },
    "Qwen-Qwen2.5-7B-Instruct": {
        "both": "content_none* nothing* parts*",
    },
    "Qwen-Qwen3-0.6B": {
        "both": "content_none* nothing* parts* tool_call_no_content* tool_call_none*",
    },
    "Qwen3-Coder": {
        "both": "content_none* nothing* parts* tool_call_text_arguments*",
    },
    "Qwen3.5-4B": {
        "both": "developer* nothing* tool_call_text_arguments* unknown_role*",
    },
    "StepFun3.5-Flash": {
        "both": "nothing* tool_call_text_arguments*",
    },
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {
        "both": "parts* tool_call_no_content*",
    },
    "deepseek-ai-DeepSeek-V3.1": {
        "both": "content_none* parts*",
    },
    "deepseek-ai-DeepSeek-V4": {
        "both": "tool_call_text_arguments*",
    },
    "google-gemma-2-2b-it": {
        "both": (
            "assistant_first* content_none* developer* empty* nothing* reasoning_last* system* tool_call* "
            "tool_call_no_content* tool_call_none* tool_call_text_arguments* tool_calls_two* turns* "
            "unknown_role*"
        ),
    },
    "google-gemma-4-31B-it": {
        "both": "nothing*",
    },
    "meta-llama-Llama-3.1-8B-Instruct": {
        "both": "nothing* tool_calls_two*",
    },
    "mistralai-Mistral-Nemo-Instruct-2407": {
        "both": "assistant_first* content_none* developer* nothing* parts* unknown_role*",
    },
    "openai-gpt-oss-120b": {
        "both": "content_none* nothing* parts* tool_call_none*",
    },
    "poolside-Laguna-S-2.1": {
        "both": "tool_call_text_arguments*",
    },
}


@pytest.mark.parametrize("name", template_names())
def test_render_equals_jinja(name: str) -> None:
    source = (template_directory() / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    different: list[str] = []
    refused: dict[str, set[str]] = {"both": set(), "ours": set(), "theirs": set()}
    for conversation, tool_set, generation, thinking in product(CONVERSATIONS, TOOL_SETS, (True, False), THINKING):
        case = conversation + tool_set
        messages = CONVERSATIONS[conversation]
        variables = {"tools": TOOL_SETS[tool_set], "add_generation_prompt": generation, **thinking}
        fixed = {"bos_token": "<s>", "eos_token": "</s>", "documents": None}
        expected = outcome(jinja, source, messages, **fixed, **variables)
        got = outcome(template.render, messages, **variables)
        if expected is None:
            refused["both" if got is None else "ours"].add(case)
        elif got is None:
            refused["theirs"].add(case)
        elif got != expected:
            different.append(f"{case} {variables}")
    assert different == []
    assert {kind: shorten(cases) for kind, cases in refused.items() if cases} == REFUSED.get(name, {})


def shorten(cases: set[str]) -> str:
    """Sorted names; "x*" stands for x with every tool set."""
    whole = {name for name in CONVERSATIONS if all(name + tool_set in cases for tool_set in TOOL_SETS)}
    rest = {case for case in cases if case.partition("+")[0] not in whole}
    return " ".join(sorted({f"{name}*" for name in whole} | rest))


def outcome(render: Any, *arguments: Any, **named: Any) -> str | None:
    try:
        text: str = render(*arguments, **named)
    except TemplateError:
        return None
    except Exception:
        if render is not jinja:  # our side may raise TemplateError only
            raise
        return None
    return text
