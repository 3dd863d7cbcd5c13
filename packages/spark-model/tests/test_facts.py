"""What a checkpoint says about itself, from both kinds of files."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.errors import CheckpointError, UnsupportedModelError
from spark_model.facts import ARCHITECTURES, read_facts
from spark_model.gguf_config import ARCHITECTURES as GGUF_ARCHITECTURES
from spark_model.reference import resolve_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "eos_token_id": 7,
}


def safetensors_facts(directory: Path, **files: Any) -> ModelFacts:
    """Facts of a directory with CONFIG and the given JSON files."""
    for name, content in ({"config": CONFIG} | files).items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (directory / "model.safetensors").write_bytes(bytes(123))
    return read_facts(Checkpoint("x", "x", "safetensors", directory))


SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1000000.0,
}


def gguf_facts(
    path: Path, arch: str = "qwen3", changes: dict[str, Any] | None = None, tensors: tuple[str, ...] = ()
) -> ModelFacts:
    """Facts of a GGUF file with SIZES; `changes` with a None drop a key, keys with a leading `/` are not the arch's."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (SIZES | (changes or {})).items():
        name = key[1:] if key.startswith("/") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    for tensor in ("token_embd.weight", *tensors):
        writer.add_tensor(tensor, np.zeros((10, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_facts(Checkpoint("x", "x", "gguf", path))


def test_smollm2() -> None:
    facts = read_facts(resolve_model("smollm2"))
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.context_length, facts.vocab_size, facts.weight_bytes) == (8192, 49152, 96_576_768)
    assert facts.eos_token_ids == (2, 0)  # <|im_end|>, then the control token <|endoftext|>
    assert facts.generation == {}
    assert facts.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_gguf_dense(tmp_path: Path) -> None:
    changes = {"attention.key_length": 32, "attention.value_length": 32}
    facts = gguf_facts(tmp_path / "m.gguf", "qwen3", changes, ("output.weight",))
    assert facts.architecture == "Qwen3ForCausalLM" and facts.config["model_type"] == "qwen3"
    assert facts.config["head_dim"] == 32 and facts.config["rms_norm_eps"] == 1e-6
    assert facts.config["rope_theta"] == 1e6 and facts.config["tie_word_embeddings"] is False
    assert facts.weight_bytes == 2 * 10 * 64 * 4


def test_gguf_defaults_and_biases(tmp_path: Path) -> None:
    changes = {"attention.head_count_kv": None, "rope.freq_base": None}
    facts = gguf_facts(tmp_path / "m.gguf", "qwen2", changes, ("blk.0.attn_q.bias",))
    assert facts.architecture == "Qwen2ForCausalLM"
    assert facts.config["num_key_value_heads"] == 4 and facts.config["head_dim"] == 16
    assert facts.config["rope_theta"] == 10000.0
    assert facts.config["attention_bias"] is True and facts.config["tie_word_embeddings"] is True


def test_gguf_per_layer_arrays(tmp_path: Path) -> None:
    assert (
        gguf_facts(tmp_path / "m.gguf", changes={"attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2
    )
    with pytest.raises(UnsupportedModelError, match="qwen3 with attention.head_count_kv that differs between layers"):
        gguf_facts(tmp_path / "n.gguf", changes={"attention.head_count_kv": [2, 1]})


def test_gguf_experts(tmp_path: Path) -> None:
    changes = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24}
    config = gguf_facts(tmp_path / "m.gguf", "qwen3moe", changes).config
    assert {key: config[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")} == {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    assert config["model_type"] == "qwen3_moe" and config["norm_topk_prob"] is True
    unnormalised = gguf_facts(tmp_path / "n.gguf", "qwen3moe", changes | {"expert_weights_norm": False}).config
    assert unnormalised["norm_topk_prob"] is False
    with pytest.raises(CheckpointError, match=r"'qwen3moe.expert_used_count' is 9, wanted a whole number from 1 to 8"):
        gguf_facts(tmp_path / "o.gguf", "qwen3moe", changes | {"expert_used_count": 9})
    with pytest.raises(UnsupportedModelError, match="llama with experts is not in this build"):
        gguf_facts(tmp_path / "p.gguf", "llama", changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scale_linear": 1.0}, None),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.attn_factor": 1.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_gguf_rope_scaling(changes: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path) -> None:
    assert gguf_facts(tmp_path / "m.gguf", changes=changes).config["rope_scaling"] == wanted


def test_gguf_eos_and_sampling(tmp_path: Path) -> None:
    changes = {
        "/tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "b", "c"],
        "/tokenizer.ggml.token_type": [1, 3, 1, 3, 1, 3],
        "/tokenizer.ggml.eos_token_id": 3,
        "/tokenizer.ggml.eot_token_id": 5,
        "/tokenizer.ggml.eom_token_id": 4000,
        "/general.sampling.temp": 0.6,
        "/general.sampling.top_k": 20,
        "/general.sampling.penalty_repeat": 1.05,
    }
    facts = gguf_facts(tmp_path / "m.gguf", changes=changes)
    # eos, eot, the control token <|im_end|>; not 4000 (outside), not <|eot_id|> (an ordinary token here)
    assert facts.eos_token_ids == (3, 5, 1)
    assert facts.generation == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert facts.vocab_size == 10  # rows of the embedding, which may be padded


@pytest.mark.parametrize(
    ("arch", "changes", "error", "message"),
    [
        ("gemma3", {}, UnsupportedModelError, "architecture 'gemma3' is not in this build, it has llama, qwen2, qwen3"),
        ("qwen3", {"block_count": None}, CheckpointError, "'qwen3.block_count' is missing, wanted a whole number"),
        ("qwen3", {"block_count": 0}, CheckpointError, "'qwen3.block_count' is 0"),
        ("qwen3", {"block_count": 1 << 30}, CheckpointError, "wanted a whole number from 1 to 4096"),
        ("qwen3", {"embedding_length": "many"}, CheckpointError, "'qwen3.embedding_length' is many"),
        (
            "qwen3",
            {"attention.layer_norm_rms_epsilon": None},
            CheckpointError,
            "rms_epsilon' is missing, wanted a number",
        ),
        ("qwen3", {"rope.freq_base": float("nan")}, CheckpointError, "'qwen3.rope.freq_base' is nan"),
        ("qwen3", {"attention.head_count_kv": 3}, CheckpointError, "4 attention heads are not a multiple of 3"),
        ("qwen3", {"attention.value_length": 8}, UnsupportedModelError, "values of another size than keys"),
        ("qwen3", {"rope.dimension_count": 8}, UnsupportedModelError, "RoPE on a part of the head"),
        ("qwen3", {"rope.scaling.type": "longrope"}, UnsupportedModelError, "RoPE scaling 'longrope'"),
        (
            "qwen3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
            UnsupportedModelError,
            "rope.scaling.attn_factor",
        ),
        (
            "qwen3",
            {"/tokenizer.ggml.tokens": ["a"] * 11},
            CheckpointError,
            "11 tokens, 'token_embd.weight' has 10 rows",
        ),
    ],
)
def test_gguf_that_cannot_run(
    arch: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        gguf_facts(tmp_path / "m.gguf", arch, changes)


def test_safetensors(tmp_path: Path) -> None:
    facts = safetensors_facts(
        tmp_path,
        generation_config={
            "eos_token_id": [7, 9, 500],
            "temperature": 0.6,
            "top_k": 20,
            "do_sample": True,
            "top_p": None,
        },
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>"},
            "added_tokens_decoder": {"11": {"content": "<|im_end|>"}, "12": {"content": "<|endoftext|>"}, "13": {}},
        },
    )
    assert facts == ModelFacts(
        architecture="Qwen3ForCausalLM",
        config=CONFIG,
        context_length=4096,
        vocab_size=100,
        eos_token_ids=(7, 9, 11, 12),
        generation={"temperature": 0.6, "top_k": 20},
        weight_bytes=123,
    )


def test_safetensors_without_small_files(tmp_path: Path) -> None:
    facts = safetensors_facts(tmp_path, config=CONFIG | {"architectures": None, "eos_token_id": None})
    assert facts.architecture == "Qwen3ForCausalLM"  # by its model_type
    assert facts.eos_token_ids == () and facts.generation == {}


def test_safetensors_eos_from_tokenizer_json(tmp_path: Path) -> None:
    tokens = [{"id": 3, "content": "<|im_end|>"}, {"id": 4, "content": "</s>"}, {"content": "<|eot_id|>"}, "odd"]
    facts = safetensors_facts(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer={"added_tokens": tokens})
    assert facts.eos_token_ids == (7, 4, 3)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{", CheckpointError, r"config\.json: not valid JSON"),
        ("[]", CheckpointError, r"config\.json: wanted a JSON object, got list"),
        ({}, CheckpointError, "neither `architectures` nor `model_type` names the model"),
        (CONFIG | {"architectures": ["GemmaForCausalLM"]}, UnsupportedModelError, "'GemmaForCausalLM' is not in this"),
        ({"model_type": "gemma"}, UnsupportedModelError, "architecture 'gemma' is not in this build, it has Llama"),
        (CONFIG | {"vocab_size": "many"}, CheckpointError, "`vocab_size` is 'many', wanted a whole number"),
        (CONFIG | {"max_position_embeddings": None}, CheckpointError, "`max_position_embeddings` is 'None'"),
        (
            CONFIG | {"quantization_config": {"quant_method": "fp8"}},
            UnsupportedModelError,
            "weights quantised with 'fp8' are not in this build",
        ),
    ],
)
def test_safetensors_that_cannot_run(config: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        safetensors_facts(tmp_path, config=config)


def test_published_configs(tmp_path: Path) -> None:
    folder = os.environ.get("SPARK_TEST_DATA")
    if folder is None:
        pytest.skip("SPARK_TEST_DATA is not set: no published configs")
    outcomes: dict[str, int | str] = {}
    for path in sorted(Path(folder, "model-configs").glob("*/config.json")):
        try:
            outcomes[path.parent.name] = safetensors_facts(tmp_path, config=path.read_text()).context_length
        except UnsupportedModelError as error:
            outcomes[path.parent.name] = str(error).split(": ", 1)[1].split(" is not")[0].split(" are not")[0]
    assert outcomes == {
        "qwen3-0.6b": 40960,
        "qwen3-30b-a3b": 40960,
        "qwen3-30b-a3b-fp8": "weights quantised with 'fp8'",
        "qwen3-8b": 40960,
        "qwen3-next-80b-a3b": "architecture 'Qwen3NextForCausalLM'",
        "qwen3.5-27b": "architecture 'Qwen3_5ForConditionalGeneration'",
        "qwen3.5-35b-a3b": "architecture 'Qwen3_5MoeForConditionalGeneration'",
        "qwen3.5-35b-a3b-nvfp4": "architecture 'Qwen3_5MoeForConditionalGeneration'",
    }


def test_both_kinds_know_the_same_architectures() -> None:
    assert {model_type: name for name, model_type in GGUF_ARCHITECTURES.values()} == ARCHITECTURES
