"""A model on a device, as the scheduler sees it: steps in, tokens out."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spark_kernels.paged_attention import PagedBatch
from spark_kernels.sampling import SamplingRow, sample
from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.config import ModelConfig
from spark_model.errors import UnsupportedModelError
from spark_model.factory import create_model, find_model_class
from spark_model.facts import read_facts
from spark_model.layers.decoder import Decoder, Precision
from spark_model.loaders import ProgressReport, WeightSource, open_weights
from spark_runtime.device_memory import allocated_bytes
from spark_runtime.errors import DeviceError
from spark_runtime.kvcache.pool import KvPool, bytes_per_block
from spark_runtime.memory import KvDemand, MemoryPlan, plan_memory
from spark_runtime.types import SequenceId, SequenceStep, StepResult

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What a runner needs to load a model and to plan its memory.

    bound_bytes      for weights, workspace and KV cache together
    kv_cache_bytes   bounds the KV cache as well; 0 = what bound_bytes leaves
    num_blocks       asks for just so many KV blocks; None = what the bound leaves
    max_model_len    tokens of the longest sequence
    max_step_tokens  tokens that one step may run, over all sequences
    """

    device: Literal["cpu", "cuda"]
    dtype: DtypeName
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    bound_bytes: int
    kv_cache_bytes: int = 0
    num_blocks: int | None = None


class ModelRunner:
    """Implements spark_runtime.types.Runner. One thread calls it; it keeps nothing about a sequence but its KV blocks."""

    def __init__(self, model: Decoder, pool: KvPool, plan: MemoryPlan | None = None) -> None:
        """plan   how the pool came to its size, for the start-up table; None where the caller chose it."""
        self.model = model
        self.pool = pool
        self.plan = plan

    @classmethod
    def create(
        cls, checkpoint: Checkpoint, config: RunnerConfig, *, progress: ProgressReport | None = None
    ) -> "ModelRunner":
        """Load the checkpoint and allocate the KV pool.

        progress   called with (bytes read, bytes in all) while weights are read

        Raises OutOfMemoryError before reading a weight where the plan cannot hold one sequence of max_model_len tokens,
        UnsupportedModelError and WeightMissingError as create_model does.
        """
        facts = read_facts(checkpoint)
        model_config = ModelConfig.from_facts(facts)
        check_length(model_config, config.max_model_len)
        precision = choose_precision(config.dtype, facts, config.device)
        with closing(open_weights(checkpoint, progress=progress)) as source:
            _plan(model_config, _least_weight_bytes(source, facts, precision.weights), config, precision)
            before = allocated_bytes(config.device)
            model = create_model(model_config, source, precision=precision, device=config.device)
        weight_bytes = max(model.weight_bytes, allocated_bytes(config.device) - before)
        plan = _plan(model_config, weight_bytes, config, precision)
        pool = KvPool.create(
            model.kv_shapes(model_config),
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            dtype=precision.cache,
            device=config.device,
        )
        return cls(model, pool, plan)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def step(self, steps: Sequence[SequenceStep]) -> StepResult:
        """Run one forward pass over all steps and draw tokens.

        Raises DeviceError when the device failed or ran out of memory.
        """
        if not steps:
            return StepResult([])
        drawing = [index for index, step in enumerate(steps) if step.sampling is not None]
        try:
            with torch.inference_mode():
                logits = self._forward(steps, drawing)
                drawn = sample(logits, [_sampling_row(steps[index]) for index in drawing]) if drawing else []
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            raise DeviceError(f"{self.model.device}: a step of {len(steps)} sequences failed: {error}") from error
        tokens: list[int | None] = [None] * len(steps)
        for index, token in zip(drawing, drawn, strict=True):
            tokens[index] = token
        return StepResult(tokens)

    def release(self, sequence: SequenceId) -> None:
        """Nothing is kept: a sequence is its blocks, which are the scheduler's."""

    def _forward(self, steps: Sequence[SequenceStep], drawing: Sequence[int]) -> Tensor:
        """Logits [len(drawing), V] of the last token of each drawing step."""
        device = self.model.device
        batch, token_ids, positions = build_batch(steps, self.pool.block_size, device)
        rows = torch.tensor([batch.query_starts[index + 1] - 1 for index in drawing], dtype=torch.int64, device=device)
        return self.model.forward(token_ids, positions, self.pool, batch, rows)


def build_batch(
    steps: Sequence[SequenceStep], block_size: int, device: torch.device
) -> tuple[PagedBatch, Tensor, Tensor]:
    """The batch, token ids [T] and positions [T] of steps, in the order of the steps."""
    starts = np.array([step.start for step in steps])
    counts = np.array([len(step.token_ids) for step in steps])
    ends = np.cumsum(counts)
    token_ids = np.fromiter((token for step in steps for token in step.token_ids), dtype=np.int64, count=int(ends[-1]))
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    contexts = starts + counts
    table = np.zeros((len(steps), max(len(step.block_ids) for step in steps)), dtype=np.int64)
    for row, step in enumerate(steps):
        table[row, : len(step.block_ids)] = step.block_ids
        # The scheduler promises this; writing into block 0 of somebody else would go unnoticed.
        assert len(step.block_ids) * block_size >= contexts[row], f"sequence {step.sequence} lacks blocks"
    blocks = table[np.repeat(np.arange(len(steps)), counts), positions // block_size]
    batch = PagedBatch(
        slots=torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        block_table=torch.from_numpy(table).to(device),
        query_starts=(0, *ends.tolist()),
        context_lengths=tuple(contexts.tolist()),
    )
    return batch, torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device)


def _sampling_row(step: SequenceStep) -> SamplingRow:
    params = step.sampling
    assert params is not None, "only drawing steps come here"
    return SamplingRow(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        position=step.start + len(step.token_ids),  # of the token to draw
        forbidden=step.forbidden,
    )


def choose_precision(name: DtypeName, facts: ModelFacts, device: str) -> Precision:
    """A name gives weights and activations of that dtype. "auto" gives

    on GPUs   the checkpoint's 16-bit dtype, else bf16
    on CPUs   fp32 activations, since CPUs compute 16-bit ones by way of fp32; weights that may be made smaller and keys
              and values in bf16, because a decode step costs the reading of them, unless the checkpoint holds fp32
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        return Precision(dtypes[name], dtypes[name], dtypes[name])
    stored = facts.config.get("dtype") or facts.config.get("torch_dtype")
    if device == "cpu":
        narrow = torch.float32 if stored == "float32" else torch.bfloat16
        return Precision(weights=narrow, activations=torch.float32, cache=narrow)
    chosen = torch.float16 if stored == "float16" else torch.bfloat16
    return Precision(chosen, chosen, chosen)


def check_length(config: ModelConfig, max_model_len: int) -> None:
    """Raise UnsupportedModelError for lengths at which dynamic RoPE would turn keys that are in the cache already."""
    if config.rope.type == "dynamic" and max_model_len > config.rope.original_length:
        raise UnsupportedModelError(
            f"dynamic RoPE beyond {config.rope.original_length} tokens is not in this build, got {max_model_len} "
            "(--max-seq-len)"
        )


def _least_weight_bytes(source: WeightSource, facts: ModelFacts, dtype: torch.dtype) -> int:
    """What the weights take at least: in `dtype`, or as they are stored where that is less (GGUF blocks)."""
    converted = sum(math.prod(source.shape(name)) for name in source.names()) * dtype.itemsize
    return min(facts.weight_bytes, converted)


def _plan(model: ModelConfig, weight_bytes: int, config: RunnerConfig, precision: Precision) -> MemoryPlan:
    model_class = find_model_class(model.architecture)
    shapes = model_class.kv_shapes(model)
    return plan_memory(
        bound_bytes=config.bound_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=model_class.workspace_bytes(
            model, num_tokens=config.max_step_tokens, num_rows=config.max_num_seqs, context_length=config.max_model_len
        ),
        kv=KvDemand(
            bytes_per_block=bytes_per_block(shapes, config.block_size, precision.cache),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
        ),
        kv_cache_bytes=config.kv_cache_bytes,
        num_blocks=config.num_blocks,
    )
