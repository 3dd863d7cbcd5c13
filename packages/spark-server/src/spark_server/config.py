"""What was decided: the frozen configuration that the parts of the server are built from.

Each part takes its own slice, never the whole. `resolve()` (options.py holds what was typed) makes a ServeConfig.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spark_model.checkpoint import Checkpoint

Origin = Literal["request", "flag", "env", "recipe", "model", "checkpoint", "default"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request is silent. `origin` maps each field name to where its value comes from."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    origin: dict[str, Origin]


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP side. Times in seconds, sizes in bytes; 0 = no limit for request_timeout_s and max_queue_depth.

    max_output_tokens     ceiling of a request's new tokens, and the limit of a request that names none
    chat_template_kwargs  template variables for requests that do not set them
    disable_thinking      enable_thinking is false whatever a request says (chat_template_kwargs has it false too)
    thinking_default      whether to think where nobody says; None = as the template does
    max_thinking_budget   reasoning tokens of a request that names no number; None = no limit
    system_fingerprint    stands in OpenAI's answers; another model or build has another one
    """

    host: str
    port: int
    served_model_names: tuple[str, ...]
    max_model_len: int
    max_output_tokens: int
    request_timeout_s: float
    shutdown_timeout_s: float
    max_queue_depth: int
    max_body_bytes: int
    chat_template: Path | None
    use_template_overrides: bool
    chat_template_kwargs: dict[str, Any]
    sampling: SamplingDefaults
    disable_thinking: bool = False
    thinking_default: bool | None = None
    max_thinking_budget: int | None = None
    system_fingerprint: str = "fp_spark"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler, in sequences and tokens. max_prefill_tokens 0 = a prompt in one piece."""

    policy: Literal["fifo"]
    max_batch_size: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs to load and run the model.

    dtype               "auto" lets the model and device decide
    memory_bound_bytes  the engine process may use no more, everything included
    kv_cache_bytes      the KV pool may use no more; 0 = what memory_bound_bytes leaves after the weights
    """

    checkpoint: Checkpoint
    device: Literal["cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "safetensors", "gguf"]
    block_size: int
    memory_bound_bytes: int
    num_threads: int
    scheduler: SchedulerConfig
    kv_cache_bytes: int = 0
    log_level: LogLevel = "info"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `spark serve` decided. `origin` maps option names to where the value comes from."""

    checkpoint: Checkpoint
    http: HttpConfig
    engine: EngineConfig
    log_level: LogLevel
    origin: dict[str, Origin]
