"""Every request field of openai-python's types is honoured, knowingly ignored or refused by name; none is overlooked."""

import json
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from spark_server.errors import InvalidRequestError
from spark_server.http.testing import create_config
from spark_server.protocols.body import decode_body
from spark_server.protocols.openai_body import IGNORED_FIELDS, OpenAiBody
from spark_server.protocols.openai_chat_request import CHAT_UNAVAILABLE, ChatBody, lower_chat
from spark_server.protocols.openai_completion_request import COMPLETION_UNAVAILABLE, CompletionBody, lower_completion
from spark_server.request import ChatPrompt, GenerationRequest, Tool, ToolChoice

USER = {"role": "user", "content": "hi"}


def official_fields(params: Any) -> set[str]:
    kinds = (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    return {name for kind in kinds for name in get_type_hints(kind)}


@pytest.mark.parametrize(
    ("params", "body", "refused"),
    [(chat_params, ChatBody, CHAT_UNAVAILABLE), (completion_params, CompletionBody, COMPLETION_UNAVAILABLE)],
)
def test_every_official_field_is_in_exactly_one_list(
    params: Any, body: type[OpenAiBody], refused: Mapping[str, Any]
) -> None:
    honoured = set(body.__struct_encode_fields__) - set(refused)
    lists = (honoured, set(refused), set(IGNORED_FIELDS))
    fields = official_fields(params)
    assert {"stream", "model", "n"} <= fields
    assert {name: sum(name in entries for entries in lists) for name in fields} == dict.fromkeys(fields, 1)


def test_ignored_fields_are_not_counted_as_unknown() -> None:
    data = json.dumps({"messages": [], **dict.fromkeys(IGNORED_FIELDS, 1), "never_heard_of": 1})
    assert decode_body(data.encode(), ChatBody)[1] == ["never_heard_of"]


def lower_all(**fields: Any) -> list[GenerationRequest]:
    return lower_chat(decode_body(json.dumps({"messages": [USER], **fields}).encode(), ChatBody)[0], create_config())


def lower(**fields: Any) -> GenerationRequest:
    [request] = lower_all(**fields)
    return request


def completions(**fields: Any) -> list[GenerationRequest]:
    return lower_completion(decode_body(json.dumps(fields).encode(), CompletionBody)[0], create_config())


def refusal(**fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(InvalidRequestError) as caught:
        lower_all(**fields)
    return caught.value.param, caught.value.code


def test_choices_share_the_prompt_and_count_the_seed_up() -> None:
    requests = lower_all(n=3, seed=-1)
    assert {id(request.prompt) for request in requests} == {id(requests[0].prompt)}
    assert [request.sampling.seed for request in requests] == [2**63 - 1, 0, 1]
    assert len({request.sampling.seed for request in lower_all(n=3)}) == 3
    assert len(lower_all(n=16)) == 16
    assert refusal(n=17) == refusal(n=0) == ("n", None)


def test_completion_choices_come_prompt_by_prompt() -> None:
    requests = completions(prompt=["a", "b"], n=2, seed=5, echo=True, logprobs=3)
    assert [request.prompt is requests[place // 2 * 2].prompt for place, request in enumerate(requests)] == [True] * 4
    assert requests[0].prompt is not requests[2].prompt
    assert [request.sampling.seed for request in requests] == [5, 6, 5, 6]
    assert {(request.sampling.num_logprobs, request.sampling.num_prompt_logprobs) for request in requests} == {(3, 3)}
    assert all(request.echo for request in requests)


def test_completion_logprobs_of_the_prompt_only_with_echo() -> None:
    [request] = completions(prompt="a", logprobs=0)
    assert (request.sampling.num_logprobs, request.sampling.num_prompt_logprobs, request.echo) == (0, None, False)
    [request] = completions(prompt="a", echo=True, max_tokens=0)
    assert (request.max_tokens, request.sampling.num_prompt_logprobs) == (1, None)


def test_chat_logprobs() -> None:
    assert lower().sampling.num_logprobs is None
    assert lower(logprobs=True).sampling.num_logprobs == 0
    assert lower(logprobs=True, top_logprobs=20).sampling.num_logprobs == 20
    assert lower(logprobs=False, top_logprobs=0).sampling.num_logprobs is None
    assert refusal(top_logprobs=3) == refusal(logprobs=True, top_logprobs=21) == ("top_logprobs", None)
    assert refusal(logprobs=True, top_logprobs=-1) == ("top_logprobs", None)


def test_extensions_reach_the_request() -> None:
    request = lower(
        top_n_sigma=1.5,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"7": -100},
        dry_multiplier=0.8,
        dry_base=2,
        dry_allowed_length=3,
        dry_sequence_breakers=["\n", "x"],
        xtc_probability=0.5,
        xtc_threshold=0.2,
        priority=-3,
        cache_salt="s",
        return_token_ids=True,
        parallel_tool_calls=False,
    )
    sampling = request.sampling
    assert (sampling.top_n_sigma, sampling.repetition_penalty, sampling.logit_bias) == (1.5, 1.2, ((7, -100.0),))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 0.5)
    assert (sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length) == (0.8, 2, 3)
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.5, 0.2)
    assert (request.priority, request.cache_salt, request.wants_tokens) == (-3, "s", True)
    assert (request.dry_breakers, request.parallel_tool_calls) == (("\n", "x"), False)
    assert refusal(dry_sequence_breakers=[""]) == ("dry_sequence_breakers", None)
    assert refusal(dry_sequence_breakers=["x"] * 65) == ("dry_sequence_breakers", None)


F = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g", "strict": True}}
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("choice", "expected", "visible"),
    [
        (None, ToolChoice("auto"), "fg"),
        ("auto", ToolChoice("auto"), "fg"),
        ("none", ToolChoice("none"), ""),
        ("required", ToolChoice("required"), "fg"),
        (NAMED, ToolChoice("named", "g"), "fg"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            ToolChoice("required"),
            "g",
        ),
    ],
)
def test_tools(choice: Any, expected: ToolChoice, visible: str) -> None:
    request = lower(tools=[F, G], tool_choice=choice)
    assert isinstance(request.prompt, ChatPrompt)
    tools = {"f": Tool("f", "F.", {"type": "object"}), "g": Tool("g", strict=True)}
    assert request.tool_choice == expected
    assert list(request.prompt.tools) == [tools[name] for name in visible]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "unsupported_tool"),
        ({"tools": ["f"]}, "tools[0].type", "unsupported_tool"),
        ({"tools": [F, {"type": "function"}]}, "tools[1].function", None),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [F, F]}, "tools", None),
        ({"tools": [F], "tool_choice": NAMED}, "tool_choice", None),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice", None),
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "unsupported_tool"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", None),
        (
            {
                "tools": [F],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            },
            "tool_choice.allowed_tools",
            None,
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[0].tool_calls[0]",
            "unsupported_tool",
        ),
    ],
)
def test_tools_refused(fields: dict[str, Any], param: str, code: str | None) -> None:
    assert refusal(**fields) == (param, code)


def test_messages_echo_our_own_answers() -> None:
    function = {"name": "f", "arguments": {"x": 1}}
    request = lower(
        messages=[
            {"role": "assistant", "content": None, "refusal": "no", "reasoning": "hm", "reasoning_content": None},
            {"role": "assistant", "content": None, "tool_calls": None, "function_call": function},
            {"role": "function", "name": "f", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        ]
    )
    call = {"id": "", "type": "function", "function": function}
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "", "name": "f"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": {}}}]},
    ]


def test_thinking_comes_from_every_field() -> None:
    assert lower(thinking={"type": "enabled", "budget_tokens": 5}).thinking.budget == 5
    for name in ("thinking_token_budget", "max_thinking_tokens", "thinking_budget"):
        assert lower(**{name: 6}).thinking.budget == 6
        assert refusal(**{name: -1}) == (name, None)
    assert lower(reasoning={"effort": "low"}, reasoning_effort="high").thinking.effort == "low"
    assert lower(reasoning_effort="high", max_tokens=100).thinking.budget == 90
    assert lower(enable_thinking=False).thinking.enabled is False
    assert lower(chat_template_kwargs={"enable_thinking": True}).thinking.enabled is True
    assert refusal(reasoning_effort="huge") == ("reasoning_effort", None)
    assert refusal(reasoning={"effort": "huge"}) == ("reasoning.effort", None)
    assert refusal(reasoning="low") == ("reasoning", None)
    assert refusal(thinking_budget=1, max_thinking_tokens=2) == ("max_thinking_tokens", None)


def test_stored_metadata_is_bounded() -> None:
    lower(metadata={"a": [1, {"b": 2}]})
    lower(store=True, metadata={"k" * 64: "v" * 512})
    for metadata in ({"k": 1}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(place): "v" for place in range(17)}):
        assert refusal(store=True, metadata=metadata) == ("metadata", None)
