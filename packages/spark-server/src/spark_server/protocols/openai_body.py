"""What the bodies of OpenAI's two generating endpoints share: sampling, limits, stops, and what this build refuses.

Unknown keys are ignored, as clients of other servers send many. Known keys that would change the answer and cannot be
honoured are refused by name; known keys that do not change it are ignored (IGNORED_FIELDS says which were thought of).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.sampling import SamplingFields, lower_limits, lower_sampling, lower_stop
from spark_server.request import GenerationRequest, Prompt

# Accepted without effect: accounting, caching and routing hints, and what is about other endpoints' features.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "audio",
        "web_search_options",
    }
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class OpenAiBody(SamplingFields, frozen=True, kw_only=True):
    """The fields that both endpoints honour, and those that are refused unless they ask for what happens anyway."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None

    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    adapter: Any = None
    num_beams: Any = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


def _is_never_neutral(value: object) -> bool:
    return False


# A field that this build does not have, and whether a value asks for nothing more than what happens without it.
UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "prompt_logprobs": lambda value: value is False,
    "response_format": lambda value: value == {"type": "text"},
    "return_token_ids": lambda value: value is False,
    "adapter": _is_never_neutral,
    "num_beams": lambda value: value == 1,
    "grammar": _is_never_neutral,
    "guided_json": _is_never_neutral,
    "guided_regex": _is_never_neutral,
    "guided_choice": _is_never_neutral,
    "guided_grammar": _is_never_neutral,
    "structured_outputs": _is_never_neutral,
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


def lower_body(
    body: OpenAiBody,
    prompt: Prompt,
    config: HttpConfig,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
) -> GenerationRequest:
    """Check ranges, fill in the server's defaults and make the internal request."""
    return GenerationRequest(
        prompt=prompt,
        sampling=lower_sampling(body, config),
        received=time.monotonic(),
        stop_strings=lower_stop(body.stop),
        **lower_limits(body, config, max_tokens=max_tokens, name=max_tokens_name),
    )
