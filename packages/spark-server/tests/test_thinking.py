"""Directives about reasoning: which one decides, what budget comes out, what the template gets."""

from typing import Any

import pytest

from spark_server.errors import InvalidRequestError
from spark_server.http.testing import create_config
from spark_server.protocols.thinking import EFFORTS, ResolvedThinking, ThinkingDirectives, resolve_thinking
from spark_server.request import Thinking

# Directives of a request, the strongest first, each saying "think" with a budget or effort of its own, or "do not".
ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 11}},
    {"budget": 12},
    {"nested_effort": "low"},
    {"effort": "high"},
    {"template_kwargs": {"enable_thinking": True}},
    {"enable_thinking": True},
]
OFF: list[dict[str, Any]] = [
    {"thinking": {"type": "disabled"}},
    {"budget": 0},
    {"nested_effort": "none"},
    {"effort": "none"},
    {"template_kwargs": {"enable_thinking": False}},
    {"enable_thinking": False},
]


def resolve(*, config: Any = None, max_tokens: int | None = None, **directives: Any) -> ResolvedThinking:
    return resolve_thinking(ThinkingDirectives(**directives), create_config(**(config or {})), max_tokens=max_tokens)


def thinking(**arguments: Any) -> Thinking:
    return resolve(**arguments).thinking


def test_silence_leaves_it_to_the_template() -> None:
    assert resolve() == ResolvedThinking(Thinking(), {})


@pytest.mark.parametrize("weaker", range(6))
@pytest.mark.parametrize("stronger", range(6))
def test_the_stronger_directive_decides(stronger: int, weaker: int) -> None:
    if stronger < weaker:
        assert thinking(**OFF[stronger], **ON[weaker]) == Thinking(enabled=False)
        assert thinking(**ON[stronger], **OFF[weaker]) == thinking(**ON[stronger])
        assert thinking(**ON[stronger], **OFF[weaker]).enabled is True


def test_the_server_s_words_are_the_weakest_and_disable_thinking_the_strongest() -> None:
    defaults = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_default": True}
    assert thinking(config=defaults).enabled is False
    assert thinking(config={"thinking_default": True}).enabled is True
    for directive in ON:
        assert thinking(config=defaults, **directive).enabled is True
        off = resolve(config={"disable_thinking": True, "thinking_default": True}, **directive)
        assert off == ResolvedThinking(Thinking(enabled=False), {"enable_thinking": False})


def test_weaker_directives_fill_in_what_is_open() -> None:
    adaptive = {"type": "adaptive"}
    assert thinking(thinking=adaptive, effort="high") == Thinking(True, None, "high")
    assert thinking(thinking=adaptive, budget=7, effort="low", nested_effort="max") == Thinking(True, 7, "max")
    assert thinking(thinking={"budget_tokens": 5}, budget=7) == Thinking(True, 5)
    kwargs = {"enable_thinking": False, "reasoning_effort": "high"}
    assert thinking(template_kwargs=kwargs) == Thinking(enabled=False)
    assert thinking(template_kwargs={"thinking_budget": 3, "reasoning_effort": "low"}) == Thinking(True, 3, "low")


@pytest.mark.parametrize(
    ("effort", "budget"),
    [("none", None), ("minimal", 25), ("low", 50), ("medium", 100), ("high", 200), ("xhigh", 400), ("max", 400)],
)
def test_effort_is_a_share_of_the_server_s_budget(effort: str, budget: int | None) -> None:
    config = {"max_thinking_budget": 100}
    for channel in ("effort", "nested_effort"):
        assert thinking(config=config, **{channel: effort}).budget == budget
    assert thinking(config=config, template_kwargs={"reasoning_effort": effort}).budget == budget
    assert thinking(effort=effort).budget is None


def test_budgets_are_bounded_by_the_server_and_by_max_tokens() -> None:
    config = {"max_thinking_budget": 100}
    assert thinking(config=config).budget == 100
    assert thinking(config=config, budget=7).budget == 7
    assert thinking(config=config, budget=1000).budget == 400
    assert thinking(config=config, effort="high", max_tokens=50).budget == 45
    assert thinking(max_tokens=50) == Thinking(None, 45)
    assert thinking(max_tokens=1).budget == 1
    assert thinking(max_tokens=50, enable_thinking=False).budget is None


def test_the_template_gets_the_decision_and_the_other_variables() -> None:
    config = {"chat_template_kwargs": {"tone": "dry", "enable_thinking": True, "reasoning_effort": "low"}}
    resolved = resolve(config=config, effort="high", template_kwargs={"tone": "warm", "add_generation_prompt": False})
    assert resolved.template_kwargs == {"tone": "warm", "enable_thinking": True, "reasoning_effort": "high"}
    off = resolve(
        config=config, template_kwargs={"enable_thinking": False, "thinking_budget": 4, "x": 1}, effort="none"
    )
    assert off.template_kwargs == {"tone": "dry", "x": 1, "enable_thinking": False}


@pytest.mark.parametrize(
    ("directives", "param"),
    [
        ({"effort": "hgih"}, "reasoning_effort"),
        ({"effort": "hgih", "effort_name": "output_config.effort"}, "output_config.effort"),
        ({"nested_effort": "big"}, "reasoning.effort"),
        ({"template_kwargs": {"reasoning_effort": "big"}}, "chat_template_kwargs.reasoning_effort"),
        ({"template_kwargs": {"reasoning_effort": ["low"]}}, "chat_template_kwargs.reasoning_effort"),
        ({"template_kwargs": {"thinking_budget": "5"}}, "chat_template_kwargs.thinking_budget"),
        ({"template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"budget": -1}, "thinking_token_budget"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": "on"}, "thinking"),
    ],
)
def test_wrong_directives_are_refused_by_name(directives: dict[str, Any], param: str) -> None:
    for config in ({}, {"disable_thinking": True}):
        with pytest.raises(InvalidRequestError) as caught:
            resolve(config=config, **directives)
        assert caught.value.param == param


def test_wrong_directives_are_refused_beside_stronger_ones() -> None:
    with pytest.raises(InvalidRequestError, match=f"expected one of {', '.join(EFFORTS)}"):
        resolve(thinking={"type": "disabled"}, effort="hgih")
