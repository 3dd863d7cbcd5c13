"""Sampling fields, which all protocols take, and their way into the internal request.

They are OpenAI's, vLLM's and llama.cpp's names; a protocol that has only some of them officially takes the rest too.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spark_runtime.types import SamplingParams
from spark_server.config import HttpConfig
from spark_server.errors import InvalidRequestError
from spark_server.protocols.body import check_range

MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_DRY_BREAKERS = 64
DRY_BREAKERS = ("\n", ":", '"', "*")  # where DRY was first implemented, repetitions end at these
SEED_RANGE = 2**63


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Body fields that mean the same in every protocol."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None


def lower_sampling(
    fields: SamplingFields,
    config: HttpConfig,
    *,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Check ranges and fill in the server's defaults. Raises InvalidRequestError naming the field."""
    check_range("temperature", fields.temperature, 0, 2)
    check_range("top_p", fields.top_p, 0, 1)
    check_range("top_k", fields.top_k, -1, 2**31 - 1)
    check_range("min_p", fields.min_p, 0, 1)
    check_range("top_n_sigma", fields.top_n_sigma, -1, None)
    check_range("seed", fields.seed, -SEED_RANGE, SEED_RANGE - 1)
    check_range("presence_penalty", fields.presence_penalty, -2, 2)
    check_range("frequency_penalty", fields.frequency_penalty, -2, 2)
    check_range("dry_multiplier", fields.dry_multiplier, 0, 100)
    check_range("dry_base", fields.dry_base, 1, 100)
    check_range("dry_allowed_length", fields.dry_allowed_length, 1, 2**16)
    check_range("xtc_probability", fields.xtc_probability, 0, 1)
    check_range("xtc_threshold", fields.xtc_threshold, 0, 1)
    if fields.repetition_penalty is not None and not 0 < fields.repetition_penalty <= 100:
        raise InvalidRequestError(
            f"Invalid 'repetition_penalty': {fields.repetition_penalty}, expected more than 0 and at most 100.",
            param="repetition_penalty",
        )
    defaults = config.sampling
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    top_k = defaults.top_k if fields.top_k is None else max(fields.top_k, 0)  # -1 is how others say "off"
    if top_p == 0:  # the smallest set of tokens whose probability reaches 0 is the likeliest token alone
        top_p, top_k = 1.0, 1
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % SEED_RANGE,
        top_n_sigma=max(fields.top_n_sigma or 0.0, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=_lower_logit_bias(fields.logit_bias or {}),
        dry_multiplier=fields.dry_multiplier or 0.0,
        dry_base=1.75 if fields.dry_base is None else fields.dry_base,
        dry_allowed_length=2 if fields.dry_allowed_length is None else fields.dry_allowed_length,
        xtc_probability=fields.xtc_probability or 0.0,
        xtc_threshold=0.1 if fields.xtc_threshold is None else fields.xtc_threshold,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def lower_limits(fields: SamplingFields, config: HttpConfig, *, max_tokens: int | None, name: str) -> dict[str, Any]:
    """The GenerationRequest fields about lengths and time. `name` is what the protocol calls max_tokens."""
    check_range(name, max_tokens, 1, None)
    check_range("min_tokens", fields.min_tokens, 0, None)
    check_range("timeout", fields.timeout, 0, None)
    check_range("priority", fields.priority, -(2**31), 2**31 - 1)
    if max_tokens is not None and fields.min_tokens is not None and fields.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"Invalid 'min_tokens': {fields.min_tokens} is above {name}, which is {max_tokens}.", param="min_tokens"
        )
    return {
        "max_tokens": max_tokens,
        "min_tokens": fields.min_tokens or 0,
        "ignore_eos": bool(fields.ignore_eos),
        "stop_token_ids": fields.stop_token_ids or [],
        "include_stop": bool(fields.include_stop_str_in_output),
        "shows_special": fields.skip_special_tokens is False,
        "timeout_s": config.request_timeout_s if fields.timeout is None else fields.timeout,
        "priority": fields.priority or 0,
        "cache_salt": fields.cache_salt,
        "dry_breakers": _lower_breakers(fields.dry_sequence_breakers),
    }


def lower_stop(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"Invalid '{name}': {len(stops)} strings, the maximum is {MAX_STOP_STRINGS}.", param=name
        )
    if "" in stops:
        raise InvalidRequestError(f"Invalid '{name}': a stop string is empty, expected at least one character.", name)
    return stops


def _lower_breakers(breakers: Sequence[str] | None) -> tuple[str, ...]:
    name = "dry_sequence_breakers"
    if breakers is None:
        return DRY_BREAKERS
    if len(breakers) > MAX_DRY_BREAKERS:
        raise InvalidRequestError(
            f"Invalid '{name}': {len(breakers)} strings, the maximum is {MAX_DRY_BREAKERS}.", param=name
        )
    if "" in breakers:
        raise InvalidRequestError(f"Invalid '{name}': a string is empty, expected at least one character.", name)
    return tuple(breakers)


def _lower_logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"Invalid 'logit_bias': {len(biases)} entries, the maximum is {MAX_LOGIT_BIASES}.", param="logit_bias"
        )
    lowered: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(f"Invalid 'logit_bias': '{key[:40]}' is no token id.", param="logit_bias")
        check_range("logit_bias", bias, -100, 100)
        lowered[int(key)] = bias
    return tuple(lowered.items())
