"""OpenAI's legacy completions: the body and its way to the internal requests, one for each choice of each prompt."""

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
from spark_server.protocols.structure import lower_structure
from spark_server.request import GenerationRequest, TextPrompt, TokenPrompt

DEFAULT_MAX_TOKENS = 16  # OpenAI's; a chat goes on to the end of its turn instead

Prompt = str | list[str | int | list[int]]


class CompletionBody(OpenAiBody, frozen=True, kw_only=True):
    """logprobs: false is how some clients say that they want none."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | bool | None = None

    suffix: Any = None
    best_of: Any = None


COMPLETION_UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    **UNAVAILABLE,
    "suffix": lambda value: value == "",
    "best_of": lambda value: value == 1,
}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """What the request decides about how the answer looks.

    num_choices    for each prompt
    hides_answer   only the prompt was asked for: the one token that the engine makes is not shown
    """

    num_choices: int = 1
    with_logprobs: bool = False
    with_token_ids: bool = False
    hides_answer: bool = False
    include_usage: bool = False
    count_usage: bool = False


def lower_completion(body: CompletionBody, config: HttpConfig) -> list[GenerationRequest]:
    """Prompt by prompt, all choices of one together. Raises InvalidRequestError naming the field."""
    refuse_unavailable(body, COMPLETION_UNAVAILABLE)
    structure = lower_structure(body)
    num_logprobs = _num_logprobs(body)
    requests: list[GenerationRequest] = []
    for prompt in _lower_prompts(body.prompt):
        request = lower_body(
            body,
            prompt,
            config,
            max_tokens=_max_tokens(body),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_logprobs if body.echo else None,
        )
        requests += spread_choices(replace(request, echo=bool(body.echo), structure=structure), body.n)
    return requests


def shape_completion(body: CompletionBody) -> CompletionShape:
    return CompletionShape(
        num_choices=body.n or 1,
        with_logprobs=_num_logprobs(body) is not None,
        with_token_ids=bool(body.return_token_ids),
        hides_answer=_hides_answer(body),
        include_usage=includes_usage(body),
        count_usage=counts_usage(body),
    )


def _hides_answer(body: CompletionBody) -> bool:
    """max_tokens 0 with echo is how evaluators ask for a prompt's log probabilities."""
    return bool(body.echo) and body.max_tokens == 0


def _max_tokens(body: CompletionBody) -> int:
    if _hides_answer(body):
        return 1  # the engine always makes one
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def _num_logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is True:
        raise InvalidRequestError("Invalid 'logprobs': true, expected a number from 0 to 20.", "logprobs")
    if body.logprobs is None or body.logprobs is False:
        return None
    check_logprobs("logprobs", body.logprobs)
    return body.logprobs


def _lower_prompts(prompt: Prompt) -> list[TextPrompt | TokenPrompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise InvalidRequestError("Invalid 'prompt': the array is empty, expected at least one prompt.", "prompt")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [TokenPrompt(token_ids)]
    if token_ids:
        raise InvalidRequestError(
            "Invalid 'prompt': the array mixes token ids with prompts; send ids of one prompt, or prompts.", "prompt"
        )
    return [
        TextPrompt(item) if isinstance(item, str) else TokenPrompt(item) for item in prompt if not isinstance(item, int)
    ]
