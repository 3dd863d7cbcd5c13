"""What the bodies of OpenAI's two generating endpoints share: sampling, limits, stops, and what this build refuses.

Unknown keys are ignored, as clients of other servers send many. Known keys that would change the answer and cannot be
honoured are refused by name; known keys that do not change it are ignored (IGNORED_FIELDS says which were thought of).
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from spark_runtime.types import SamplingParams
from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError, ModelNameError
from spark_server.generation import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

MAX_STOP_STRINGS = 16

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


class OpenAiBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints honour, and those that are refused unless they ask for what happens anyway."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    timeout: float | None = None
    n: int | None = None

    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    adapter: Any = None
    top_n_sigma: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    num_beams: Any = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


Body = TypeVar("Body", bound=OpenAiBody)


def _is_never_neutral(value: object) -> bool:
    return False


# A field that this build does not have, and whether a value asks for nothing more than what happens without it.
UNAVAILABLE: Mapping[str, Callable[[Any], bool]] = {
    "n": lambda value: value == 1,
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "logit_bias": lambda value: value == {},
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "prompt_logprobs": lambda value: value is False,
    "response_format": lambda value: value == {"type": "text"},
    "return_token_ids": lambda value: value is False,
    "adapter": _is_never_neutral,
    "top_n_sigma": lambda value: value in (0, -1),
    "dry_multiplier": lambda value: value == 0,
    "xtc_probability": lambda value: value == 0,
    "num_beams": lambda value: value == 1,
    "grammar": _is_never_neutral,
    "guided_json": _is_never_neutral,
    "guided_regex": _is_never_neutral,
    "guided_choice": _is_never_neutral,
    "guided_grammar": _is_never_neutral,
    "structured_outputs": _is_never_neutral,
}


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """Raises InvalidRequestError with the path of what is wrong."""
    if not data.strip():
        raise InvalidRequestError("the body is empty, expected a JSON object")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        path = path.removesuffix("`")
        param = path.removeprefix("$").removeprefix(".") or None
        message = f"{path or '$'}: {reason[:1].lower()}{reason[1:]}"
        raise InvalidRequestError(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is not valid JSON for this server: it is nested too deeply") from None


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


def served_name(name: str | None, config: HttpConfig) -> str:
    """The name that the response carries. Raises ModelNameError for one that is not served."""
    if name is None:
        return config.served_model_names[0]
    if name not in config.served_model_names:
        served = ", ".join(f"`{served}`" for served in config.served_model_names)
        raise ModelNameError(f"the model `{name}` is not served here; served: {served}")
    return name


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
    prompt: ChatPrompt | TextPrompt | TokenPrompt,
    config: HttpConfig,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
) -> GenerationRequest:
    """Check ranges, fill in the server's defaults and make the internal request."""
    check_range(max_tokens_name, max_tokens, 1, None)
    check_range("min_tokens", body.min_tokens, 0, None)
    check_range("timeout", body.timeout, 0, None)
    if max_tokens is not None and body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"Invalid 'min_tokens': {body.min_tokens} is above {max_tokens_name}, which is {max_tokens}.",
            param="min_tokens",
        )
    return GenerationRequest(
        prompt=prompt,
        sampling=_lower_sampling(body, config),
        max_tokens=max_tokens,
        stop_strings=_lower_stop(body.stop),
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        timeout_s=config.request_timeout_s if body.timeout is None else body.timeout,
        received=time.monotonic(),
    )


def check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    """Raises InvalidRequestError naming the field, the value and the bound. None passes."""
    if value is None:
        return
    if value < low:
        raise InvalidRequestError(f"Invalid '{name}': {value} is below the minimum of {low}.", param=name)
    if high is not None and value > high:
        raise InvalidRequestError(f"Invalid '{name}': {value} is above the maximum of {high}.", param=name)


def _lower_sampling(body: OpenAiBody, config: HttpConfig) -> SamplingParams:
    check_range("temperature", body.temperature, 0, 2)
    check_range("top_p", body.top_p, 0, 1)
    check_range("top_k", body.top_k, -1, 2**31 - 1)
    check_range("min_p", body.min_p, 0, 1)
    check_range("seed", body.seed, -(2**63), 2**63 - 1)
    defaults = config.sampling
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)  # -1 is how others say "off"
    if top_p == 0:  # the smallest set of tokens whose probability reaches 0 is the likeliest token alone
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**63,
    )


def _lower_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"Invalid 'stop': {len(stops)} strings, the maximum is {MAX_STOP_STRINGS}.", param="stop"
        )
    if "" in stops:
        raise InvalidRequestError("Invalid 'stop': a stop string is empty, expected at least one character.", "stop")
    return stops
