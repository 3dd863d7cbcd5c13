"""From what was asked for to what is decided. Pure: no file, no environment, no device is looked at here.

Precedence: flag, environment, recipe, MODEL.toml, the checkpoint, the built-in default.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.model_toml import ModelToml
from spark_server.config import EngineConfig, HttpConfig, Origin, SamplingDefaults, SchedulerConfig, ServeConfig
from spark_server.errors import ConfigError, StartupError
from spark_server.machine import Machine
from spark_server.options.checks import find_problems
from spark_server.options.layers import Layer, Merged, built_in_defaults, merge
from spark_server.options.spec import UNSET, Unset
from spark_server.options.table import option_table
from spark_server.options.values import render_value

MAX_BODY_BYTES = 32 << 20

# What a request gets where neither it nor an option, MODEL.toml or the checkpoint says anything: OpenAI's neutral values.
NEUTRAL_SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

# A small model with its engine and server stays under 1.5 GiB; a context longer than this gets its room nevertheless.
CPU_KV_CACHE_BYTES = 256 << 20

# On the CPU longer chunks are no faster, and attention scores take memory by chunk × context.
CPU_PREFILL_TOKENS = 512

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that is not a default, as the start-up log shows it."""

    name: str
    value: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Resolved:
    """warnings: what the operator should know or do, one line each."""

    config: ServeConfig
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]


def resolve(
    layers: Sequence[Layer],
    *,
    model_name: str,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    model_toml: ModelToml | None,
    machine: Machine,
    problems: Sequence[str] = (),
) -> Resolved:
    """`layers` without the built-in defaults, the strongest first; `model_name` unless an option names it.

    `problems` were found before, by looking at files; they are reported with what is found here.

    Raises ConfigError with every violation, StartupError where the options are right and the memory is too small.
    """
    problems = [*problems, *find_problems(layers)]
    merged = merge([*layers, built_in_defaults()])
    problems += _format_problems(merged, checkpoint) + _recipe_problems(checkpoint)
    max_model_len = min(_settled(merged.options.memory.max_seq_len), facts.context_length)
    kv_cache_bytes, memory_bound_bytes, memory_problems = _plan_memory(merged, facts, machine, max_model_len)
    if problems:
        raise ConfigError(describe_problems([*problems, *memory_problems]))
    if memory_problems:
        raise StartupError(describe_problems(memory_problems))

    sampling = _sampling_defaults(merged, facts, model_toml)
    origin: dict[str, Origin] = dict(merged.origin)
    if facts.context_length < _settled(merged.options.memory.max_seq_len):
        origin["max_seq_len"] = "checkpoint"
    config = ServeConfig(
        checkpoint=checkpoint,
        http=replace(
            _http_config(merged, model_name, max_model_len, sampling, model_toml),
            system_fingerprint=_fingerprint(facts, checkpoint, _settled(merged.options.model.dtype)),
        ),
        engine=_engine_config(merged, checkpoint, machine, max_model_len, memory_bound_bytes, kv_cache_bytes),
        log_level=_settled(merged.options.server.log_level),
        origin=origin,
    )
    return Resolved(config, _settings(merged, config), _warnings(config))


def describe_problems(problems: Sequence[str]) -> str:
    """One line when there is one problem, else a heading and a line each."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} options cannot be used:" + "".join(f"\n  {problem}" for problem in unique)


def _settled(value: T | Unset) -> T:
    """The value of an option that has a built-in default."""
    assert value is not UNSET, "an option without a built-in default was read as if it had one"
    return value


def _given(value: T | Unset, otherwise: T) -> T:
    return otherwise if value is UNSET else value


def _http_config(
    merged: Merged, model_name: str, max_model_len: int, sampling: SamplingDefaults, model_toml: ModelToml | None
) -> HttpConfig:
    server, template = merged.options.server, merged.options.template
    names = _given(merged.options.model.model_name, model_name).split(",")
    disable_thinking = _given(template.disable_thinking, False)
    chat_template_kwargs: dict[str, Any] = dict(_given(template.default_chat_template_kwargs, {}))
    if disable_thinking:
        chat_template_kwargs["enable_thinking"] = False
    return HttpConfig(
        host=_settled(server.bind),
        port=_settled(server.port),
        served_model_names=tuple(dict.fromkeys(name.strip() for name in names if name.strip())),
        max_model_len=max_model_len,
        max_output_tokens=min(_given(merged.options.sampling.max_output_tokens, max_model_len), max_model_len),
        request_timeout_s=float(_settled(server.request_timeout)),
        shutdown_timeout_s=float(_settled(server.shutdown_timeout)),
        max_queue_depth=_settled(server.max_queue_depth),
        max_body_bytes=MAX_BODY_BYTES,
        chat_template=_given(template.chat_template, None),
        use_template_overrides=not _given(template.disable_template_overrides, False),
        chat_template_kwargs=chat_template_kwargs,
        sampling=sampling,
        disable_thinking=disable_thinking,
        thinking_default=None if model_toml is None else model_toml.thinking_default,
        max_thinking_budget=_given(
            template.max_thinking_budget, None if model_toml is None else model_toml.max_thinking_budget
        ),
    )


def _fingerprint(facts: ModelFacts, checkpoint: Checkpoint, dtype: str) -> str:
    """The same for the same model, number format and build; no path goes into it."""
    parts = [
        version("spark-server"),
        checkpoint.path.name,
        checkpoint.kind,
        facts.architecture,
        facts.weight_bytes,
        dtype,
    ]
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def _engine_config(
    merged: Merged,
    checkpoint: Checkpoint,
    machine: Machine,
    max_model_len: int,
    memory_bound_bytes: int,
    kv_cache_bytes: int,
) -> EngineConfig:
    scheduling, model, memory = merged.options.scheduling, merged.options.model, merged.options.memory
    return EngineConfig(
        checkpoint=checkpoint,
        device="cpu",
        dtype=_settled(model.dtype),
        load_format=_settled(model.load_format),
        block_size=_settled(memory.block_size),
        memory_bound_bytes=memory_bound_bytes,
        num_threads=_given(memory.num_threads, machine.num_cpus),
        scheduler=SchedulerConfig(
            policy="fifo",
            max_batch_size=_settled(scheduling.max_batch_size),
            max_num_seqs=_settled(scheduling.max_num_seqs),
            max_prefill_tokens=_given(scheduling.max_prefill_tokens, CPU_PREFILL_TOKENS),
            max_model_len=max_model_len,
        ),
        kv_cache_bytes=kv_cache_bytes,
        log_level=_settled(merged.options.server.log_level),
    )


def _sampling_defaults(merged: Merged, facts: ModelFacts, model_toml: ModelToml | None) -> SamplingDefaults:
    values: dict[str, float] = {}
    origin: dict[str, Origin] = {}
    for name, neutral in NEUTRAL_SAMPLING.items():
        option = f"default_{name}"
        asked = merged.values.get(option)
        if isinstance(asked, (int, float)):
            values[name], origin[name] = asked, merged.origin[option]
        elif model_toml is not None and name in model_toml.sampling:
            values[name], origin[name] = model_toml.sampling[name], "model"
        elif name in facts.generation:
            values[name], origin[name] = facts.generation[name], "checkpoint"
        else:
            values[name], origin[name] = neutral, "default"
    return SamplingDefaults(
        temperature=float(values["temperature"]),
        top_p=float(values["top_p"]),
        top_k=int(values["top_k"]),
        min_p=float(values["min_p"]),
        origin=origin,
    )


def _format_problems(merged: Merged, checkpoint: Checkpoint) -> list[str]:
    wanted = _settled(merged.options.model.load_format)
    if wanted in ("auto", checkpoint.kind):
        return []
    return [f"{merged.labels['load_format']}: {checkpoint.path.name} is {checkpoint.kind}; drop the option"]


def _recipe_problems(checkpoint: Checkpoint) -> list[str]:
    """What a recipe asks for beside its options. Leaving it out would serve something else than the recipe describes."""
    recipe = checkpoint.recipe
    if recipe is None:
        return []
    problems = []
    if recipe.min_nodes > 1:
        problems.append(
            f"recipe {recipe.name}: needs {recipe.min_nodes} ranks; not available in this build, which runs one"
        )
    if recipe.command is not None:
        problems.append(f"recipe {recipe.name}: `command` templates are not available in this build; use `defaults`")
    return problems


def _plan_memory(merged: Merged, facts: ModelFacts, machine: Machine, max_model_len: int) -> tuple[int, int, list[str]]:
    """Bytes for the KV pool, bytes for the engine, and what does not fit.

    The pool is what max_batch_size full contexts need, but on the CPU no more than CPU_KV_CACHE_BYTES or one full
    context (the larger) unless --gpu-memory-utilization is given, and never more than the bound leaves after the weights.
    """
    memory = merged.options.memory
    bound = int(_settled(memory.gpu_memory_utilization) * machine.available_memory_bytes)
    block_size = _settled(memory.block_size)
    bytes_per_block = block_size * _kv_bytes_per_token(facts, _settled(merged.options.model.dtype))
    one_context = -(-max_model_len // block_size) * bytes_per_block
    room = bound - facts.weight_bytes
    if one_context > room:
        fitting = max(0, room) // bytes_per_block * block_size if bytes_per_block else 0
        fix = f"give --max-seq-len {fitting} or less" if fitting else "a smaller model is needed"
        problem = (
            f"--max-seq-len {max_model_len}: needs {_gib(one_context)} of KV cache beside {_gib(facts.weight_bytes)} of "
            f"weights, and the engine may use {_gib(bound)} (--gpu-memory-utilization); {fix}"
        )
        return 0, bound, [problem]
    wanted = one_context * _settled(merged.options.scheduling.max_batch_size)
    if merged.origin["gpu_memory_utilization"] == "default":
        wanted = min(wanted, max(CPU_KV_CACHE_BYTES, one_context))
    return min(wanted, room), bound, []


def _kv_bytes_per_token(facts: ModelFacts, dtype: str) -> int:
    """For "auto" as if it were float32, which is the most that it can become.

    0 where the configuration has no such numbers: no model of this build, which the engine refuses by its architecture.
    """
    num_layers, num_heads = _count(facts, "num_hidden_layers"), _count(facts, "num_attention_heads")
    kv_heads = _count(facts, "num_key_value_heads") or num_heads
    head_dim = _count(facts, "head_dim") or (_count(facts, "hidden_size") // num_heads if num_heads else 0)
    bytes_per_element = 4 if dtype in ("auto", "float32") else 2
    return 2 * num_layers * kv_heads * head_dim * bytes_per_element


def _count(facts: ModelFacts, key: str) -> int:
    value = facts.config.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _settings(merged: Merged, config: ServeConfig) -> tuple[Setting, ...]:
    found = []
    for name, option in option_table().items():
        if merged.origin.get(name, "default") == "default" and config.origin.get(name, "default") == "default":
            continue
        value = config.http.max_model_len if name == "max_seq_len" else merged.values[name]
        text = "(hidden)" if option.spec.is_secret else render_value(value)
        found.append(Setting(name, text, config.origin[name]))
    sampling = config.http.sampling
    for name, origin in sampling.origin.items():
        if origin in ("model", "checkpoint"):
            found.append(Setting(f"default_{name}", render_value(getattr(sampling, name)), origin))
    return tuple(found)


def _warnings(config: ServeConfig) -> tuple[str, ...]:
    warnings = []
    if config.http.host in ("0.0.0.0", "::"):
        warnings.append("every machine that reaches this one can use the server; --bind 127.0.0.1 keeps it local")
    recipe = config.checkpoint.recipe
    if recipe is not None:
        warnings += recipe.warnings
    if recipe is not None and recipe.env:
        names = ", ".join(sorted(recipe.env))
        warnings.append(f"recipe {recipe.name}: env is not applied: {names}; set them before the start if they matter")
    return tuple(warnings)
