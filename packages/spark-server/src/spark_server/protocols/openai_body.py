"""What the bodies of OpenAI's two generating endpoints share: sampling, limits, stops, structure, and what is refused.

Unknown keys are ignored, as clients of other servers send many. Known keys that would change the answer and cannot be
honoured are refused by name; known keys that do not change it are ignored (IGNORED_FIELDS says which were thought of).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.body import check_range
from spark_server.protocols.sampling import (
    MAX_TOP_LOGPROBS,
    SEED_RANGE,
    SamplingFields,
    lower_limits,
    lower_sampling,
    lower_stop,
)
from spark_server.request import GenerationRequest, Prompt

MAX_CHOICES = 16

# Accepted without effect: accounting, caching and routing hints, and what is about other endpoints' features.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "audio",
        "web_search_options",
    }
)


class StreamOptions(msgspec.Struct, frozen=True):
    """continuous_usage_stats: with include_usage, every chunk has the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAiBody(SamplingFields, frozen=True, kw_only=True):
    """The fields of both endpoints, and those that are refused unless they ask for what happens anyway."""

    ignored: ClassVar[frozenset[str]] = IGNORED_FIELDS

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    return_token_ids: bool | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None

    prompt_logprobs: Any = None
    adapter: Any = None
    num_beams: Any = None


def _is_never_neutral(value: object) -> bool:
    return False


# A field that this build does not have, and whether a value asks for nothing more than what happens without it.
UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    "prompt_logprobs": lambda value: value is False,
    "adapter": _is_never_neutral,
    "num_beams": lambda value: value == 1,
}


def refuse_unavailable(body: OpenAiBody, unavailable: Mapping[str, Callable[[Any], bool]]) -> None:
    for name, is_neutral in unavailable.items():
        value = getattr(body, name)
        if value is not None and not is_neutral(value):
            shown = f" with value {value!r}" if isinstance(value, bool | int | float) else ""
            raise InvalidRequestError(
                f"'{name}'{shown} is not available in this build; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def includes_usage(body: OpenAiBody) -> bool:
    """Whether the stream gets a usage chunk. Raises InvalidRequestError for stream_options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequestError(
            "'stream_options' is only allowed together with 'stream': true", param="stream_options"
        )
    return bool(body.stream_options.include_usage)


def counts_usage(body: OpenAiBody) -> bool:
    """Whether every chunk has the usage so far."""
    return includes_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)


def check_logprobs(name: str, value: int | None) -> None:
    check_range(name, value, 0, MAX_TOP_LOGPROBS)


def lower_body(
    body: OpenAiBody,
    prompt: Prompt,
    config: HttpConfig,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> GenerationRequest:
    """Check ranges, fill in the server's defaults and make the internal request of the first choice."""
    return GenerationRequest(
        prompt=prompt,
        sampling=lower_sampling(body, config, num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs),
        received=time.monotonic(),
        stop_strings=lower_stop(body.stop),
        wants_tokens=bool(body.return_token_ids) or counts_usage(body),
        **lower_limits(body, config, max_tokens=max_tokens, name=max_tokens_name),
    )


def spread_choices(request: GenerationRequest, n: int | None) -> list[GenerationRequest]:
    """One request a choice: all of one prompt object, choice i with the first one's seed + i."""
    check_range("n", n, 1, MAX_CHOICES)
    seed = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, seed=(seed + place) % SEED_RANGE))
        for place in range(n or 1)
    ]
