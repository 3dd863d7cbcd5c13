"""OpenAI's chat completions: the body and its way to the internal requests, one a choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.openai_body import (
    UNAVAILABLE,
    OpenAiBody,
    check_logprobs,
    counts_usage,
    includes_usage,
    lower_body,
    refuse_unavailable,
    spread_choices,
)
from spark_server.protocols.openai_messages import ChatMessage, lower_message
from spark_server.protocols.openai_tools import lower_tools
from spark_server.protocols.structure import lower_structure
from spark_server.protocols.thinking import ThinkingDirectives, resolve_thinking
from spark_server.request import ChatPrompt, GenerationRequest, ToolChoice

# OpenAI's limits for what is kept with a stored answer.
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


class ChatBody(OpenAiBody, frozen=True, kw_only=True):
    """`messages` has no default, so leaving it out is a wrong body."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    thinking: Any = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    thinking_budget: int | None = None
    reasoning: Any = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    moderation: Any = None


CHAT_UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    **UNAVAILABLE,
    "functions": lambda value: value == [],  # `tools` has them; an answer of the old form would be a second one
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value in ([], ["text"]),
    "moderation": lambda value: False,
}


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What the request decides about how the answer looks."""

    tool_choice: ToolChoice
    with_logprobs: bool = False
    with_token_ids: bool = False
    include_usage: bool = False
    count_usage: bool = False
    metadata: Mapping[str, Any] | None = None
    service_tier: str | None = None


def lower_chat(body: ChatBody, config: HttpConfig) -> list[GenerationRequest]:
    """One request a choice; all share the prompt. Raises InvalidRequestError naming what is wrong or not available."""
    refuse_unavailable(body, CHAT_UNAVAILABLE)
    _check_metadata(body)
    if not body.messages:
        raise InvalidRequestError("Invalid 'messages': the array is empty, expected at least one message.", "messages")
    max_tokens, name = _max_tokens(body)
    tools, tool_choice = lower_tools(body.tools, body.tool_choice)
    resolved = resolve_thinking(_directives(body), config, max_tokens=max_tokens)
    prompt = ChatPrompt(
        messages=[lower_message(place, message) for place, message in enumerate(body.messages)],
        template_kwargs=resolved.template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=tools,
    )
    request = lower_body(
        body, prompt, config, max_tokens=max_tokens, max_tokens_name=name, num_logprobs=_num_logprobs(body)
    )
    request = replace(
        request,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structure=lower_structure(body),
        thinking=resolved.thinking,
    )
    return spread_choices(request, body.n)


def shape_chat(body: ChatBody, request: GenerationRequest) -> ChatShape:
    """`request` is one of those that the body was lowered to."""
    return ChatShape(
        tool_choice=request.tool_choice,
        with_logprobs=bool(body.logprobs),
        with_token_ids=bool(body.return_token_ids),
        include_usage=includes_usage(body),
        count_usage=counts_usage(body),
        metadata=body.metadata,
        service_tier=body.service_tier,
    )


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The limit and the name that the client has for it."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError(
            f"'max_tokens' is {body.max_tokens} and 'max_completion_tokens' is {body.max_completion_tokens}; "
            "they mean the same, send one",
            param="max_tokens",
        )
    return body.max_completion_tokens, "max_completion_tokens"


def _num_logprobs(body: ChatBody) -> int | None:
    check_logprobs("top_logprobs", body.top_logprobs)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("'top_logprobs' is only allowed together with 'logprobs': true", "top_logprobs")
    return None


def _directives(body: ChatBody) -> ThinkingDirectives:
    reasoning = body.reasoning
    if reasoning is not None and not isinstance(reasoning, Mapping):
        raise InvalidRequestError("Invalid 'reasoning': expected an object with the key 'effort'.", "reasoning")
    names = ("thinking_token_budget", "max_thinking_tokens", "thinking_budget")
    budgets = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if len(set(budgets.values())) > 1:
        raise InvalidRequestError(f"{' and '.join(budgets)} differ and mean the same; send one", next(iter(budgets)))
    name, budget = next(iter(budgets.items()), (names[0], None))
    return ThinkingDirectives(
        thinking=body.thinking,
        budget=budget,
        budget_name=name,
        nested_effort=None if reasoning is None else reasoning.get("effort"),
        effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
        enable_thinking=body.enable_thinking,
    )


def _check_metadata(body: ChatBody) -> None:
    """What is stored has to be small; what is only given back may be anything."""
    if not body.store or not body.metadata:
        return
    fits = len(body.metadata) <= MAX_METADATA and all(
        len(key) <= MAX_METADATA_KEY and isinstance(value, str) and len(value) <= MAX_METADATA_VALUE
        for key, value in body.metadata.items()
    )
    if not fits:
        raise InvalidRequestError(
            f"Invalid 'metadata': expected at most {MAX_METADATA} keys of {MAX_METADATA_KEY} characters with strings of "
            f"{MAX_METADATA_VALUE} characters.",
            "metadata",
        )
