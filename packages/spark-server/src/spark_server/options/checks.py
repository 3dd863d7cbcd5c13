"""Which options this build refuses, and which do not go together. Everything is found, nothing is raised."""

from collections.abc import Callable, Iterator, Sequence

from spark_server.options.layers import Layer, Merged, merge
from spark_server.options.spec import Value
from spark_server.options.table import Option, option_table
from spark_server.options.values import render_value, suggest

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SPECULATION = ("speculative", "self_speculative", "ngram_speculative", "dflash")


def find_problems(layers: Sequence[Layer]) -> list[str]:
    """Every violation in what was given, each with what, why and what to do. Built-in defaults are not a layer here."""
    given = merge(layers)
    problems = [problem for layer in layers for problem in layer.problems]
    problems += [
        _refusal(option_table()[name], given.labels[name])
        for name, value in given.values.items()
        if not _is_in_this_build(option_table()[name], value)
    ]
    for check in _CHECKS:
        problems += check(given)
    return problems


def _is_in_this_build(option: Option, value: Value) -> bool:
    """False for a presence-only option asks for nothing, so it is always fine."""
    if option.spec.available or (option.spec.presence_only and value is False):
        return True
    return any(value == accepted and type(value) is type(accepted) for accepted in option.spec.accepts)


def _refusal(option: Option, label: str) -> str:
    accepted = " or ".join(render_value(value) for value in option.spec.accepts)
    can = f"; this build takes {accepted}" if accepted and not option.spec.presence_only else "; leave it out"
    return f"{label}: not available in this build{can}"


def _has(given: Merged, name: str) -> bool:
    """The option was given, and not as false."""
    return given.values.get(name, False) is not False


def _is_over(given: Merged, name: str, limit: float) -> bool:
    value = given.values.get(name)
    return isinstance(value, (int, float)) and value > limit


def _together(given: Merged, names: Sequence[str], why: str) -> Iterator[str]:
    labels = [given.labels[name] for name in names if _has(given, name)]
    if len(labels) > 1:
        yield f"{' and '.join(labels)}: {why}; keep one of them"


def _check_exclusive(given: Merged) -> Iterator[str]:
    yield from _together(given, _SPECULATION, "only one way to draft can run")
    yield from _together(given, ("auto_swap", "no_auto_swap"), "they contradict each other")
    yield from _together(given, ("auth_token", "auth_tokens_file"), "tokens come from one place")


def _check_needs(given: Merged) -> Iterator[str]:
    if _has(given, "require_auth") and not (_has(given, "auth_token") or _has(given, "auth_tokens_file")):
        yield f"{given.labels['require_auth']}: there is no token; add --auth-tokens-file FILE"
    if _has(given, "tbt_deadline_ms") and given.values.get("scheduling_policy") != "slai":
        yield f"{given.labels['tbt_deadline_ms']}: only slai has a deadline; add --scheduling-policy slai"
    if _has(given, "high_speed_swap") and not _has(given, "high_speed_swap_dir"):
        yield f"{given.labels['high_speed_swap']}: needs a folder; add --high-speed-swap-dir DIR"
    if not _has(given, "high_speed_swap"):
        for name in given.values:
            if name.startswith("high_speed_swap_"):
                yield f"{given.labels[name]}: has no effect without --high-speed-swap"
    if _is_over(given, "num_drafts", 1):
        if _has(given, "dflash"):
            yield f"{given.labels['num_drafts']}: the length of a dflash block is --dflash-gamma"
        elif not any(_has(given, name) for name in _SPECULATION):
            yield f"{given.labels['num_drafts']}: nothing drafts; add --speculative"


def _check_precision(given: Merged) -> Iterator[str]:
    kv = given.values.get("kv_cache_dtype")
    if kv == "bf16" and given.values.get("dtype") != "bfloat16":
        yield f"{given.labels['kv_cache_dtype']}: the KV cache has the model's type; add --dtype bfloat16"
    if _is_over(given, "fp8_kv_calibration_tokens", 0) and kv not in (None, "fp8"):
        yield f"{given.labels['fp8_kv_calibration_tokens']}: there is nothing to calibrate with --kv-cache-dtype {kv}"
    state = given.values.get("ssm_h_dtype")
    if state in ("f16", "f16-pool"):
        label = given.labels["ssm_h_dtype"]
        if state == "f16" and not _has(given, "gdn_fused_norm"):
            yield f"{label}: needs the fused norm; add --gdn-fused-norm true"
        if _has(given, "exact_verify"):
            yield f"{label}: cannot be verified exactly; drop {given.labels['exact_verify']}"
        for name in _SPECULATION if state == "f16-pool" else ("dflash",):
            if _has(given, name):
                yield f"{label}: does not go with {given.labels[name]}; drop one of them"


def _check_ranks(given: Merged) -> Iterator[str]:
    world = given.values.get("world_size")
    if isinstance(world, int):
        if _is_over(given, "rank", world - 1):
            yield f"{given.labels['rank']}: ranks go from 0 to {world - 1} (--world-size {world})"
        for name in ("tp_size", "ep_size"):
            if _is_over(given, name, world):
                yield f"{given.labels[name]}: there are only {world} ranks (--world-size {world})"
    if _has(given, "expert_category") and _is_over(given, "ep_size", 1):
        yield f"{given.labels['expert_category']}: does not go with {given.labels['ep_size']}; drop one of them"


def _check_thinking(given: Merged) -> Iterator[str]:
    kwargs = given.values.get("default_chat_template_kwargs")
    if _has(given, "disable_thinking"):
        if "max_thinking_budget" in given.values:
            yield f"{given.labels['max_thinking_budget']}: there is no thinking with {given.labels['disable_thinking']}"
        if isinstance(kwargs, dict) and kwargs.get("enable_thinking") is True:
            yield f"--default-chat-template-kwargs: enable_thinking contradicts {given.labels['disable_thinking']}"
    if isinstance(kwargs, dict):
        for key, value in kwargs.items():
            problem = _template_variable_problem(key, value)
            if problem:
                yield f"--default-chat-template-kwargs: {problem}"


def _template_variable_problem(key: str, value: object) -> str:
    match key:
        case "enable_thinking" | "preserve_thinking":
            return "" if isinstance(value, bool) else f"{key}: expected true or false, got {value!r}"
        case "reasoning_effort":
            if value in _EFFORTS:
                return ""
            return f"{key}: expected one of {', '.join(_EFFORTS)}, got {value!r}{suggest(str(value), _EFFORTS)}"
        case "thinking_budget":
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            return "" if is_count else f"{key}: expected a whole number from 0 up, got {value!r}"
        case _:
            known = ("enable_thinking", "preserve_thinking", "reasoning_effort", "thinking_budget")
            return f"unknown key {key!r}{suggest(key, known) or '; known are ' + ', '.join(known)}"


_CHECKS: tuple[Callable[[Merged], Iterator[str]], ...] = (
    _check_exclusive,
    _check_needs,
    _check_precision,
    _check_ranks,
    _check_thinking,
)
