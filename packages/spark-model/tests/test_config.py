"""ModelConfig.from_hf: both generations of config files, the RoPE variants against transformers, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spark_model.config import ModelConfig
from spark_model.errors import CheckpointError, UnsupportedModelError
from spark_model.layers.rope import rope_attention_factor, rope_frequencies
from spark_model.testing import TINY_SHAPE

LLAMA = {"architectures": ["LlamaForCausalLM"], **TINY_SHAPE}

ROPE_CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
        "rope_theta": 10000.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "rope_theta": 10000.0,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "rope_theta": 10000.0,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}


def test_from_hf_reads_a_published_config() -> None:
    data = os.environ.get("SPARK_TEST_DATA")
    if data is None:
        pytest.skip("SPARK_TEST_DATA is not set")
    config = json.loads((Path(data) / "model-configs/qwen3-30b-a3b/config.json").read_text())
    model = ModelConfig.from_hf(config)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size) == (32, 4, 128, 2048)
    assert model.rope.theta == 1_000_000.0
    assert model.rope.type == "default"
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.top_k, model.moe.intermediate_size) == (128, 8, 768)
    assert model.moe.normalize
    assert all(model.moe.is_sparse(layer) for layer in range(48))


@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_tables_equal_transformers(case: str) -> None:
    parameters = ROPE_CASES[case]
    shape = TINY_SHAPE | {"hidden_size": 256}  # 32 pairs a head: all three ranges of the ramps occur
    hf = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, rope_parameters=dict(parameters)))
    rope = ModelConfig.from_hf(LLAMA | shape | {"rope_parameters": parameters}).rope
    torch.testing.assert_close(rope_frequencies(rope), hf.inv_freq, rtol=1e-5, atol=0.0)
    assert rope_attention_factor(rope) == pytest.approx(hf.attention_scaling)


@pytest.mark.parametrize("case", ROPE_CASES)
def test_from_hf_reads_the_older_rope_scaling_alike(case: str) -> None:
    parameters = dict(ROPE_CASES[case])
    theta = parameters.pop("rope_theta")
    older_scaling = parameters | {"type": parameters.pop("rope_type")}
    older = LLAMA | {"rope_theta": theta, "rope_scaling": older_scaling}
    newer = LLAMA | {"rope_parameters": ROPE_CASES[case]}
    assert ModelConfig.from_hf(older) == ModelConfig.from_hf(newer)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_from_hf_reads_both_names_of_the_number_of_experts(key: str) -> None:
    moe = ModelConfig.from_hf(
        LLAMA | {key: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 2}
    ).moe
    assert moe is not None
    assert moe.num_experts == 6
    assert [moe.is_sparse(layer) for layer in range(4)] == [False, True, False, True]


def test_from_hf_null_counts_as_absent() -> None:
    model = ModelConfig.from_hf(LLAMA | {"head_dim": None, "rope_scaling": None, "num_key_value_heads": None})
    assert (model.head_dim, model.num_kv_heads, model.rope.type) == (16, 4, "default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "method `fp8` is not available"),
        ({"use_sliding_window": True, "sliding_window": 1024}, "sliding-window attention .window 1024."),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "activation `gelu`"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope' .* known types: default, linear"),
    ],
)
def test_from_hf_refuses_what_the_build_lacks(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"num_hidden_layers": "3"}, "`num_hidden_layers` is '3', expected a number"),
        ({"vocab_size": 0}, "`vocab_size` is 0, expected a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"architectures": []}, "`architectures` is \\[\\]"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`factor` is missing"),
        ({"num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8}, "exceeds the 2 experts"),
    ],
)
def test_from_hf_names_a_wrong_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_module_imports_no_torch() -> None:
    """The process that answers HTTP reads configs and memory plans too."""
    modules = "spark_model, spark_model.config, spark_runtime.memory, spark_runtime.types"
    script = f"import sys, {modules}; print(sorted({{'torch', 'cupy', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_from_hf_unused_sliding_window_is_no_obstacle() -> None:
    ModelConfig.from_hf(LLAMA | {"use_sliding_window": False, "sliding_window": 4096})
