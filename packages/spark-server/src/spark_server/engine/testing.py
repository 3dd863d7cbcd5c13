"""A runner without a model, for tests of everything above it. No torch.

It keeps what a real cache would: each KV slot holds a value computed from all tokens up to it, and a step starts from
the value in the slot before. A token therefore comes out right only if every block table, start and chunk was right.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from spark_model.checkpoint import Checkpoint
from spark_runtime.errors import DeviceError
from spark_runtime.types import BlockId, SamplingParams, SequenceId, SequenceStep, StepResult
from spark_server.config import EngineConfig, SchedulerConfig
from spark_server.engine.loading import LoadedModel

SCRIPTED_RUNNER = "spark_server.engine.testing:create_scripted_runner"

_EMPTY = 7
_MODULUS = (1 << 61) - 1


class ScriptedOptions(msgspec.Struct, frozen=True):
    """What the scripted runner is like. Steps are counted from 1; 0 = never.

    step_delay_s   what a step takes
    fail_at_step   the step that raises DeviceError
    load_error     what the runner's creation raises, as a DeviceError; "" = nothing
    load_delay_s   what the creation takes
    """

    num_blocks: int = 64
    block_size: int = 4
    vocab_size: int = 1000
    step_delay_s: float = 0.0
    fail_at_step: int = 0
    load_error: str = ""
    load_delay_s: float = 0.0


class ScriptedRunner:
    """Deterministic tokens, and AssertionError for a step that breaks the contract of `Runner`.

    steps      what each step was asked, newest last; kept only with `records`
    released   sequences that were released, in order
    """

    def __init__(self, options: ScriptedOptions, *, records: bool = False) -> None:
        self._options = options
        self._slots = [_EMPTY] * (options.num_blocks * options.block_size)
        self._num_cached: dict[SequenceId, int] = {}
        self._owners: dict[BlockId, SequenceId] = {}
        self._claimed: dict[SequenceId, list[BlockId]] = {}
        self._records = records
        self._num_steps = 0
        self.steps: list[list[SequenceStep]] = []
        self.released: list[SequenceId] = []

    @property
    def num_blocks(self) -> int:
        return self._options.num_blocks

    @property
    def block_size(self) -> int:
        return self._options.block_size

    @property
    def vocab_size(self) -> int:
        return self._options.vocab_size

    def step(self, steps: Sequence[SequenceStep]) -> StepResult:
        self._num_steps += 1
        if self._options.step_delay_s:
            time.sleep(self._options.step_delay_s)
        if self._num_steps == self._options.fail_at_step:
            raise DeviceError(f"scripted: step {self._num_steps} fails")
        assert steps, "a step without sequences"
        assert len({step.sequence for step in steps}) == len(steps), "a sequence is twice in one step"
        if self._records:
            self.steps.append(list(steps))
        return StepResult([self._run(step) for step in steps])

    def release(self, sequence: SequenceId) -> None:
        self.released.append(sequence)
        self._num_cached.pop(sequence, None)
        for block in self._claimed.pop(sequence, ()):
            self._owners.pop(block, None)

    def _run(self, step: SequenceStep) -> int | None:
        self._claim_blocks(step)
        end = step.start + len(step.token_ids)
        assert step.token_ids, f"sequence {step.sequence}: no tokens"
        assert step.start == self._num_cached.get(step.sequence, 0), f"sequence {step.sequence}: start {step.start}"
        assert len(step.block_ids) * self.block_size >= end, (
            f"sequence {step.sequence}: blocks do not cover {end} tokens"
        )
        value = self._slots[self._slot(step, step.start - 1)] if step.start else _EMPTY
        for position, token in enumerate(step.token_ids, start=step.start):
            value = _advance(value, token)
            self._slots[self._slot(step, position)] = value
        self._num_cached[step.sequence] = end
        if step.sampling is None:
            return None
        return _draw(value, step.sampling, step.forbidden, self.vocab_size)

    def _claim_blocks(self, step: SequenceStep) -> None:
        claimed = self._claimed.setdefault(step.sequence, [])
        known, new = step.block_ids[: len(claimed)], step.block_ids[len(claimed) :]
        assert known == claimed, f"sequence {step.sequence}: blocks {claimed} became {known}"
        for block in new:
            assert 0 <= block < self.num_blocks, f"sequence {step.sequence}: no block {block}"
            owner = self._owners.setdefault(block, step.sequence)
            assert owner == step.sequence, f"block {block} belongs to {owner}, {step.sequence} uses it too"
        claimed += new
        assert len(set(claimed)) == len(claimed), f"sequence {step.sequence}: a block twice"

    def _slot(self, step: SequenceStep, position: int) -> int:
        return step.block_ids[position // self.block_size] * self.block_size + position % self.block_size


def scripted_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: SamplingParams | None = None,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    vocab_size: int = ScriptedOptions().vocab_size,
) -> list[int]:
    """The tokens that a request has to get from a ScriptedRunner, whatever runs beside it."""
    value = _EMPTY
    for token in prompt:
        value = _advance(value, token)
    made: list[int] = []
    while len(made) < max_tokens:
        forbidden = stop_token_ids if len(made) < min_tokens else ()
        made.append(_draw(value, sampling or SamplingParams(), forbidden, vocab_size))
        if made[-1] in stop_token_ids:
            break
        value = _advance(value, made[-1])
    return made


def scripted_config(options: ScriptedOptions, scheduler: SchedulerConfig) -> EngineConfig:
    """An EngineConfig whose checkpoint reference carries the options to `create_scripted_runner`."""
    reference = msgspec.json.encode(options).decode()
    return EngineConfig(
        checkpoint=Checkpoint(reference=reference, name="scripted", kind="gguf", path=Path("scripted.gguf")),
        device="cpu",
        dtype="auto",
        load_format="auto",
        block_size=options.block_size,
        memory_bound_bytes=0,
        num_threads=1,
        scheduler=scheduler,
    )


def create_scripted_runner(config: EngineConfig, progress: Callable[[str], None]) -> LoadedModel:
    """What `--runner` of the engine process names in tests."""
    options = msgspec.json.decode(config.checkpoint.reference, type=ScriptedOptions)
    progress("loading script")
    print("scripted runner on stdout")
    time.sleep(options.load_delay_s)
    if options.load_error:
        raise DeviceError(options.load_error)
    return LoadedModel(ScriptedRunner(options), options.vocab_size, memory_bytes=0)


def _advance(value: int, token: int) -> int:
    return (value * 1_000_003 + token + 1) % _MODULUS


def _draw(value: int, sampling: SamplingParams, forbidden: Sequence[int], vocab_size: int) -> int:
    """As a real draw, a function of the history and, unless greedy, of the seed."""
    token = (value ^ (sampling.seed if sampling.temperature > 0 else 0)) * 2_654_435_761 % _MODULUS % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token
