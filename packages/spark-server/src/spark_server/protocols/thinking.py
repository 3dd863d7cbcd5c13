"""What a request says about reasoning, in all the ways that protocols have for it, becomes one decision.

Whether to think, how many tokens and with what effort are decided one by one, each by the first directive that speaks of
it, in this order:

1. the server's --disable-thinking
2. `thinking`: Anthropic's object {type: enabled | adaptive | disabled, budget_tokens}
3. `thinking_token_budget` and its aliases
4. `reasoning.effort`
5. `reasoning_effort`, `output_config.effort`
6. `chat_template_kwargs`: thinking_budget, enable_thinking, reasoning_effort
7. `enable_thinking`
8. the server's --default-chat-template-kwargs
9. MODEL.toml's thinking_default

A budget, or any effort but none, asks for thinking; effort none and a budget of 0 switch it off.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.request import Thinking

# Tokens that an effort stands for, as a multiple of --max-thinking-budget; nothing gets more than the largest.
EFFORT_SHARES: Mapping[str, float] = {"minimal": 0.25, "low": 0.5, "medium": 1.0, "high": 2.0, "xhigh": 4.0, "max": 4.0}
EFFORTS = ("none", *EFFORT_SHARES)

# Reasoning may take this share of max_tokens, so that a limited answer is not all reasoning.
MAX_TOKENS_SHARE = 0.9

# The arguments of ChatTemplate.render, which template variables from a client may not take the place of.
RESERVED_TEMPLATE_KWARGS = ("messages", "tools", "self")


@dataclass(frozen=True, slots=True)
class ThinkingDirectives:
    """One request's words on reasoning, each None or empty where it is silent. The *_name say how the client spells them.

    thinking         Anthropic's object, unchecked
    budget           thinking_token_budget or an alias
    nested_effort    reasoning.effort
    effort           the top-level one
    template_kwargs  chat_template_kwargs
    """

    thinking: Any = None
    budget: int | None = None
    nested_effort: str | None = None
    effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    budget_name: str = "thinking_token_budget"
    nested_effort_name: str = "reasoning.effort"
    effort_name: str = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class ResolvedThinking:
    """`template_kwargs` are all variables for the template, the decision among them."""

    thinking: Thinking
    template_kwargs: Mapping[str, Any]


def resolve_thinking(
    directives: ThinkingDirectives, config: HttpConfig, *, max_tokens: int | None = None
) -> ResolvedThinking:
    """Raises InvalidRequestError for a wrong directive, even where a stronger one decides."""
    _check_reserved(directives.template_kwargs)
    said = list(_read(directives, config))  # all are read before one decides, so that a wrong one is found
    kwargs = {**config.chat_template_kwargs, **directives.template_kwargs}
    kwargs.pop("add_generation_prompt", None)
    thinking = Thinking(enabled=False) if config.disable_thinking else _decide(said)
    if thinking.enabled is False:
        thinking = Thinking(enabled=False)
        kwargs.pop("reasoning_effort", None)
        kwargs.pop("thinking_budget", None)
    else:
        thinking = replace(thinking, budget=_bound_budget(thinking, config, max_tokens))
    if thinking.enabled is not None:
        kwargs["enable_thinking"] = thinking.enabled
    if thinking.effort is not None:
        kwargs["reasoning_effort"] = thinking.effort
    return ResolvedThinking(thinking, kwargs)


def _check_reserved(kwargs: Mapping[str, Any]) -> None:
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in kwargs:
            raise InvalidRequestError(
                f"Invalid 'chat_template_kwargs': '{name}' belongs to the request itself.", "chat_template_kwargs"
            )


def _read(directives: ThinkingDirectives, config: HttpConfig) -> Iterator[Thinking]:
    """What each directive says, the strongest first."""
    yield _read_object(directives.thinking)
    yield _read_budget(directives.budget_name, directives.budget)
    yield _read_effort(directives.nested_effort_name, directives.nested_effort)
    yield _read_effort(directives.effort_name, directives.effort)
    yield from _read_kwargs(directives.template_kwargs)
    yield Thinking(enabled=directives.enable_thinking)
    yield from _read_kwargs(config.chat_template_kwargs)
    yield Thinking(enabled=config.thinking_default)


def _read_object(value: Any) -> Thinking:
    if value is None:
        return Thinking()
    if not isinstance(value, Mapping):
        raise InvalidRequestError("Invalid 'thinking': expected an object with the key 'type'.", "thinking")
    kind, budget = value.get("type", "enabled"), value.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequestError(
            f"Invalid 'thinking.type': {kind!r}, expected 'enabled', 'adaptive' or 'disabled'.", "thinking.type"
        )
    said = _read_budget("thinking.budget_tokens", budget)
    return Thinking(enabled=False) if kind == "disabled" else replace(said, enabled=said.enabled is not False)


def _read_budget(name: str, value: Any) -> Thinking:
    if value is None:
        return Thinking()
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequestError(f"Invalid '{name}': {value!r}, expected a whole number from 0 up.", name)
    return Thinking(enabled=value > 0, budget=value)


def _read_effort(name: str, value: Any) -> Thinking:
    if value is None:
        return Thinking()
    if value not in EFFORTS:
        raise InvalidRequestError(f"Invalid '{name}': {value!r}, expected one of {', '.join(EFFORTS)}.", name)
    return Thinking(enabled=False) if value == "none" else Thinking(enabled=True, effort=value)


def _read_kwargs(kwargs: Mapping[str, Any]) -> Iterator[Thinking]:
    """An explicit enable_thinking is stronger than an effort in the same object."""
    yield _read_budget("chat_template_kwargs.thinking_budget", kwargs.get("thinking_budget"))
    enabled = kwargs.get("enable_thinking")
    if enabled is not None and not isinstance(enabled, bool):
        name = "chat_template_kwargs.enable_thinking"
        raise InvalidRequestError(f"Invalid '{name}': {enabled!r}, expected true or false.", name)
    yield Thinking(enabled=enabled)
    yield _read_effort("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort"))


def _decide(said: list[Thinking]) -> Thinking:
    """Weaker directives fill in what stronger ones left open; one that switches thinking off has no more to say."""
    decided = Thinking()
    for directive in said:
        if decided.enabled is None:
            decided = replace(decided, enabled=directive.enabled)
        if directive.enabled is not False:
            decided = Thinking(
                decided.enabled,
                directive.budget if decided.budget is None else decided.budget,
                decided.effort or directive.effort,
            )
    return decided


def _bound_budget(thinking: Thinking, config: HttpConfig, max_tokens: int | None) -> int | None:
    """The directive's budget, else the effort's share of the server's, else the server's; within max_tokens."""
    bounds: list[int] = []
    server = config.max_thinking_budget
    if thinking.budget is not None:
        bounds.append(thinking.budget)
    elif server is not None:
        bounds.append(int(server * EFFORT_SHARES.get(thinking.effort or "medium", 1.0)))
    if server is not None:
        bounds.append(int(server * EFFORT_SHARES["max"]))
    if max_tokens is not None:
        bounds.append(max(1, int(max_tokens * MAX_TOKENS_SHARE)))
    return min(bounds, default=None)
