"""OpenAI's bodies: what they lower to, what is refused and by which name, what is ignored."""

import json
from typing import Any

import pytest

from spark_server.errors import InvalidRequestError, ModelNameError
from spark_server.http.testing import create_config
from spark_server.protocols.body import decode_body, served_name
from spark_server.protocols.openai_body import IGNORED_FIELDS, includes_usage
from spark_server.protocols.openai_chat_request import CHAT_UNAVAILABLE, ChatBody, lower_chat
from spark_server.protocols.openai_completion_request import COMPLETION_UNAVAILABLE, CompletionBody, lower_completion
from spark_server.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

USER = {"role": "user", "content": "hi"}


def lower(*, config: Any = None, **fields: Any) -> GenerationRequest:
    """`config` changes fields of the configuration."""
    body = {"messages": [USER], **fields}
    [request] = lower_chat(decode_body(json.dumps(body).encode(), ChatBody)[0], create_config(**(config or {})))
    return request


def lower_prompts(**fields: Any) -> list[GenerationRequest]:
    return lower_completion(decode_body(json.dumps(fields).encode(), CompletionBody)[0], create_config())


def refusal(**fields: Any) -> tuple[str, str | None, str | None]:
    with pytest.raises(InvalidRequestError) as caught:
        lower(**fields)
    return str(caught.value), caught.value.param, caught.value.code


def messages_of(*messages: dict[str, Any]) -> list[Any]:
    prompt = lower(messages=list(messages)).prompt
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def test_lower_chat_defaults_are_the_server_s() -> None:
    request = lower(config={"request_timeout_s": 300.0, "chat_template_kwargs": {"enable_thinking": False}})
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.05)
    assert request.prompt == ChatPrompt([USER], {"enable_thinking": False})
    assert (request.max_tokens, request.min_tokens, request.timeout_s) == (None, 0, 300.0)
    assert (request.stop_strings, request.stop_token_ids, request.ignore_eos) == ((), [], False)


def test_lower_chat_takes_every_field() -> None:
    request = lower(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.2,
        seed=-5,
        max_completion_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        timeout=1.5,
        n=1,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.2)
    assert sampling.seed == 2**63 - 5
    assert (request.max_tokens, request.min_tokens, request.timeout_s) == (9, 2, 1.5)
    assert (request.stop_strings, request.stop_token_ids, request.ignore_eos) == (("a", "b"), [3], True)


def test_lower_chat_null_means_not_given() -> None:
    names = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    request = lower(**dict.fromkeys(names))
    assert request.sampling.temperature == 0.7
    assert request.stop_strings == ()


def test_lower_chat_sampling_spellings() -> None:
    assert lower(top_k=-1).sampling.top_k == 0
    assert (lower(top_p=0).sampling.top_p, lower(top_p=0).sampling.top_k) == (1.0, 1)
    assert lower(stop="x").stop_strings == ("x",)
    assert lower(seed=3).sampling.seed == 3
    assert lower().sampling.seed != lower().sampling.seed
    assert lower(max_tokens=4).max_tokens == lower(max_tokens=4, max_completion_tokens=4).max_tokens == 4


def test_lower_chat_messages() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    broken = {"id": "d", "type": "function", "function": {"name": "f", "arguments": '{"x": [1'}}
    lowered_call = {**call, "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
    echoed: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    assert messages_of(
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": parts, "name": "ada"},
        {**echoed, "tool_calls": [call, broken], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one\ntwo", "name": "ada"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [lowered_call, broken]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "no"},
    ]


def test_lower_chat_template_kwargs() -> None:
    request = lower(
        config={"chat_template_kwargs": {"enable_thinking": True, "tone": "dry"}},
        enable_thinking=False,
        chat_template_kwargs={"tone": "warm"},
        add_generation_prompt=False,
    )
    kwargs = {"enable_thinking": False, "tone": "warm"}
    assert request.prompt == ChatPrompt([USER], kwargs, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"temperature": -0.1}, "Invalid 'temperature': -0.1 is below the minimum of 0.", "temperature"),
        ({"temperature": 2.5}, "Invalid 'temperature': 2.5 is above the maximum of 2.", "temperature"),
        ({"top_p": 1.1}, "Invalid 'top_p': 1.1 is above the maximum of 1.", "top_p"),
        ({"top_k": -2}, "Invalid 'top_k': -2 is below the minimum of -1.", "top_k"),
        ({"min_p": 2}, "Invalid 'min_p': 2.0 is above the maximum of 1.", "min_p"),
        ({"seed": 2**63}, f"Invalid 'seed': {2**63} is above the maximum of {2**63 - 1}.", "seed"),
        ({"max_tokens": 0}, "Invalid 'max_tokens': 0 is below the minimum of 1.", "max_tokens"),
        (
            {"max_completion_tokens": -1},
            "Invalid 'max_completion_tokens': -1 is below the minimum of 1.",
            "max_completion_tokens",
        ),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "'max_tokens' is 1 and 'max_completion_tokens' is 2; they mean the same, send one",
            "max_tokens",
        ),
        ({"min_tokens": -1}, "Invalid 'min_tokens': -1 is below the minimum of 0.", "min_tokens"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "Invalid 'min_tokens': 5 is above max_tokens, which is 4.",
            "min_tokens",
        ),
        ({"timeout": -1}, "Invalid 'timeout': -1.0 is below the minimum of 0.", "timeout"),
        ({"stop": ["x"] * 17}, "Invalid 'stop': 17 strings, the maximum is 16.", "stop"),
        ({"stop": ["x", ""]}, "Invalid 'stop': a stop string is empty, expected at least one character.", "stop"),
        ({"messages": []}, "Invalid 'messages': the array is empty, expected at least one message.", "messages"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role: got 'robot', expected one of assistant, developer, function, system, tool, user",
            "messages[0].role",
        ),
        (
            {"messages": [USER, {"role": "user"}]},
            "messages[1].content: a user message needs content, got none",
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]: a 'text' part needs the key 'text'",
            "messages[0].content[0]",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "Invalid 'chat_template_kwargs': 'messages' belongs to the request itself.",
            "chat_template_kwargs",
        ),
        ({"messages": 3}, "$.messages: expected `array`, got `int`", "messages"),
        ({"messages": [{"content": "x"}]}, "$.messages[0]: object missing required field `role`", "messages[0]"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "$.messages[0].content: expected `str | array | null`, got `int`",
            "messages[0].content",
        ),
        ({"temperature": "hot"}, "$.temperature: expected `float | null`, got `str`", "temperature"),
        ({"stream": 1}, "$.stream: expected `bool | null`, got `int`", "stream"),
    ],
)
def test_lower_chat_refuses(fields: dict[str, Any], message: str, param: str) -> None:
    assert refusal(**fields) == (message, param, None)


def test_lower_chat_refuses_images_by_name() -> None:
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert refusal(messages=[{"role": "user", "content": content}]) == (
        "messages[0].content[1]: 'image_url' parts are not available in this build, only 'text'",
        "messages[0].content[1]",
        "unsupported_content",
    )


CHAT_REFUSED: list[tuple[str, Any, Any]] = [
    ("prompt_logprobs", 1, False),
    ("adapter", "x", None),
    ("num_beams", 4, 1),
    ("functions", [{"name": "f"}], []),
    ("function_call", {"name": "f"}, "auto"),
    ("modalities", ["text", "audio"], ["text"]),
    ("moderation", {"model": "x"}, None),
]


@pytest.mark.parametrize(("name", "value", "neutral"), CHAT_REFUSED)
def test_lower_chat_unavailable(name: str, value: object, neutral: object) -> None:
    message, param, code = refusal(**{name: value})
    assert message.startswith(f"'{name}'")
    assert message.endswith("is not available in this build; leave it out")
    assert (param, code) == (name, "unsupported_parameter")
    lower(**{name: neutral})


def test_lower_chat_unavailable_cases_are_complete() -> None:
    assert {name for name, _, _ in CHAT_REFUSED} == set(CHAT_UNAVAILABLE)


def test_lower_chat_ignores_known_and_unknown_fields() -> None:
    assert not IGNORED_FIELDS & set(ChatBody.__struct_fields__)
    lower(**dict.fromkeys(IGNORED_FIELDS, "anything"), never_heard_of={"x": [1]})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", [TextPrompt("text")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        ([[1], [2, 3]], [TokenPrompt([1]), TokenPrompt([2, 3])]),
    ],
)
def test_lower_completion_prompts(prompt: object, expected: list[object]) -> None:
    assert [request.prompt for request in lower_prompts(prompt=prompt)] == expected


def test_lower_completion_length_without_max_tokens_is_openais() -> None:
    assert [lower_prompts(prompt="a")[0].max_tokens, lower_prompts(prompt="a", max_tokens=99)[0].max_tokens] == [16, 99]


def test_lower_completion_seeds() -> None:
    first, second = lower_prompts(prompt=["same", "same"])
    assert first.sampling.seed != second.sampling.seed
    assert {request.sampling.seed for request in lower_prompts(prompt=["a", "b"], seed=4)} == {4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "the array is empty"),
        ({"prompt": [1, "a"]}, "mixes token ids with prompts"),
        ({"prompt": None}, "expected `str | array`, got `null`"),
        ({}, "missing required field `prompt`"),
        ({"prompt": "x", "logprobs": 21}, "Invalid 'logprobs': 21 is above the maximum of 20"),
        ({"prompt": "x", "logprobs": True}, "Invalid 'logprobs': true, expected a number"),
        ({"prompt": "x", "max_tokens": 0}, "Invalid 'max_tokens': 0 is below the minimum of 1"),
        ({"prompt": "x", "n": 17}, "Invalid 'n': 17 is above the maximum of 16"),
        ({"prompt": "x", "suffix": "y"}, "'suffix' is not available"),
        ({"prompt": "x", "best_of": 3}, "'best_of' with value 3 is not available"),
    ],
)
def test_lower_completion_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        lower_prompts(**fields)


def test_lower_completion_neutral_values() -> None:
    assert {"suffix", "best_of"} <= set(COMPLETION_UNAVAILABLE)
    [request] = lower_prompts(prompt="x", suffix="", echo=False, best_of=1, logprobs=False)
    assert (request.echo, request.sampling.num_logprobs) == (False, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
        (b'{"messages": [], "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"messages": [], "tools": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"messages": [], "temperature": NaN}', "not valid JSON"),
        (b'{"messages": [], "temperature": 1e999}', "out of range"),
    ],
)
def test_decode_body_refuses(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decode_body(data, ChatBody)


def test_served_name() -> None:
    config = create_config()
    assert served_name(None, config) == "tiny"
    assert served_name("tiny-alias", config) == "tiny-alias"
    with pytest.raises(ModelNameError, match="the model `gpt` is not served here; served: `tiny`, `tiny-alias`"):
        served_name("gpt", config)


def test_includes_usage() -> None:
    def ask(**fields: Any) -> bool:
        return includes_usage(ChatBody(messages=[], **fields))

    options = decode_body(b'{"messages": [], "stream_options": {"include_usage": true}}', ChatBody)[0].stream_options
    assert ask(stream=True, stream_options=options)
    assert not ask(stream=True)
    with pytest.raises(InvalidRequestError, match="only allowed together with 'stream'"):
        ask(stream_options=options)
