"""From an EngineConfig to a model that runs. Torch is imported by `create_runner`, after the thread counts are set."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from spark_runtime.types import Runner
from spark_server.config import EngineConfig, SchedulerConfig

MODEL_RUNNER = "spark_server.engine.loading:create_runner"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner and what the Ready frame says about it. memory_bytes: weights, workspace and KV pool as planned."""

    runner: Runner
    vocab_size: int
    memory_bytes: int


RunnerFactory = Callable[[EngineConfig, Callable[[str], None]], LoadedModel]


def create_runner(config: EngineConfig, progress: Callable[[str], None]) -> LoadedModel:
    """Load the model. Raises ModelError or DeviceError. `progress` takes one line at a time."""
    from spark_model.facts import read_facts
    from spark_model.loaders import terminal_progress
    from spark_model.runner import ModelRunner, RunnerConfig

    with terminal_progress("loading weights") as report:
        runner = ModelRunner.create(
            config.checkpoint,
            RunnerConfig(
                device=config.device,
                dtype=config.dtype,
                block_size=config.block_size,
                max_model_len=config.scheduler.max_model_len,
                max_num_seqs=config.scheduler.max_batch_size,
                max_step_tokens=max_step_tokens(config.scheduler),
                bound_bytes=config.memory_bound_bytes,
                kv_cache_bytes=config.kv_cache_bytes,
            ),
            progress=report,
        )
    if runner.plan is not None:
        for line in runner.plan.lines():
            progress(line)
    memory_bytes = runner.plan.used_bytes if runner.plan is not None else 0
    return LoadedModel(runner, read_facts(config.checkpoint).vocab_size, memory_bytes)


def max_step_tokens(config: SchedulerConfig) -> int:
    """Tokens that one step runs at most: the chunks' budget and a token of every sequence that decodes."""
    return (config.max_prefill_tokens or config.max_model_len) + config.max_batch_size


def find_factory(reference: str) -> RunnerFactory:
    """`module:function` → the function."""
    module, _, name = reference.partition(":")
    return cast("RunnerFactory", getattr(importlib.import_module(module), name))
