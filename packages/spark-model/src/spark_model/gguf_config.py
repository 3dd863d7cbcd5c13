"""GGUF metadata as a Hugging Face style config, so that one model file reads both kinds of checkpoint. No torch."""

import math
import struct
from collections.abc import Sequence
from typing import Any

from spark_model.errors import CheckpointError, UnsupportedModelError
from spark_model.gguf import GgufFile, Value

# general.architecture → (Hugging Face architecture, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
EMBEDDING = "token_embd.weight"
CONTROL_TOKEN = 3
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
GENERATION_KEYS = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
# What these keys say when they say nothing; other values change the attention scale in ways that no config key names.
NEUTRAL_YARN = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31


def config_from_gguf(gguf: GgufFile) -> dict[str, Any]:
    """`architectures`, `model_type` and the sizes, in the keys of transformers 4 (`rope_theta`, `rope_scaling`).

    Raises UnsupportedModelError for an architecture or a variant that this build lacks, CheckpointError for metadata
    that is missing or makes no sense. Llama 3's RoPE factors are no metadata but the tensor `rope_freqs.weight`.
    """
    return _ConfigReader(gguf).read()


class _ConfigReader:
    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        name = gguf.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise self.fail("metadata key 'general.architecture' is missing; this may be an adapter or a vocabulary")
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(f"{gguf.path}: architecture {name[:80]!r} is not in this build, it has {known}")
        self.prefix = name
        self.architecture, self.model_type = ARCHITECTURES[name]

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.gguf.path}: {message}")

    def unsupported(self, feature: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.gguf.path}: {self.prefix} with {feature} is not in this build")

    def value(self, key: str) -> Value | None:
        return self.gguf.metadata.get(f"{self.prefix}.{key}")

    def count(self, key: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """A whole number from 1 to `maximum`; an array counts as its one value if all layers agree."""
        value = self.value(key)
        if isinstance(value, tuple) and value:
            if any(entry != value[0] for entry in value):
                raise self.unsupported(f"{key} that differs between layers")
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= maximum:
            got = "missing" if value is None else str(value)[:40]
            raise self.fail(f"metadata key '{self.prefix}.{key}' is {got}, wanted a whole number from 1 to {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # a number by the first test
            got = "missing" if value is None else str(value)[:40]
            raise self.fail(f"metadata key '{self.prefix}.{key}' is {got}, wanted a number")
        return _shortest(value)  # type: ignore[arg-type]  # as above

    def read(self) -> dict[str, Any]:
        heads = self.count("attention.head_count")
        kv_heads = self.count("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise self.fail(f"{heads} attention heads are not a multiple of {kv_heads} key-value heads")
        hidden_size = self.count("embedding_length")
        head_dim = self.count("attention.key_length", hidden_size // heads or 1)
        if self.count("attention.value_length", head_dim) != head_dim:
            raise self.unsupported("values of another size than keys")
        if self.count("rope.dimension_count", head_dim) != head_dim:
            raise self.unsupported("RoPE on a part of the head")
        context_length = self.count("context_length")
        tensors = self.gguf.tensors
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": hidden_size,
            "intermediate_size": self.count("feed_forward_length", self.count("expert_feed_forward_length", 1)),
            "num_hidden_layers": self.count("block_count", maximum=MAX_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self.rope_scaling(context_length),
            "max_position_embeddings": context_length,
            "vocab_size": self.vocab_size(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        }
        return config | self.experts()

    def vocab_size(self) -> int:
        embedding = self.gguf.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise self.fail(
                f"tensor '{EMBEDDING}' is missing or not a matrix; this may be a vocabulary without a model"
            )
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens", ())
        rows = embedding.shape[0]
        if isinstance(tokens, tuple) and len(tokens) > rows:
            raise self.fail(f"the vocabulary has {len(tokens)} tokens, '{EMBEDDING}' has {rows} rows")
        return rows

    def experts(self) -> dict[str, Any]:
        if self.model_type != "qwen3_moe":
            if self.value("expert_count") not in (None, 0):
                raise self.unsupported("experts")
            return {}
        num_experts = self.count("expert_count")
        return {
            "num_experts": num_experts,
            "num_experts_per_tok": self.count("expert_used_count", maximum=num_experts),
            "moe_intermediate_size": self.count("expert_feed_forward_length"),
            # llama.cpp normalises qwen3moe's weights always; the key exists for other architectures
            "norm_topk_prob": self.value("expert_weights_norm") is not False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def rope_scaling(self, context_length: int) -> dict[str, Any] | None:
        kind = self.value("rope.scaling.type")
        if kind is None:
            # files from before the key: a bare linear factor
            factor = self.number("rope.scale_linear", 1.0)
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind != "yarn":
            raise self.unsupported(f"RoPE scaling {str(kind)[:40]!r}")
        factor = self.number("rope.scaling.factor")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length", context_length),
        }
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if self.value(f"rope.scaling.{key}") is not None:
                scaling[name] = self.number(f"rope.scaling.{key}")
        for key, neutral in NEUTRAL_YARN.items():
            if self.number(f"rope.scaling.{key}", neutral) != neutral:
                raise self.unsupported(f"rope.scaling.{key}")
        return scaling


def eos_ids_from_gguf(gguf: GgufFile, turn_ends: Sequence[str]) -> list[int]:
    """eos, eot and eom, then the control tokens among `turn_ends`."""
    metadata = gguf.metadata
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    if isinstance(tokens, tuple) and isinstance(types, tuple) and len(tokens) == len(types):
        wanted = set(turn_ends)
        ids += [id for id, token in enumerate(tokens) if token in wanted and types[id] == CONTROL_TOKEN]
    return [id for id in ids if type(id) is int]


def generation_from_gguf(gguf: GgufFile) -> dict[str, Value]:
    """The sampling values that newer converters copy from generation_config.json."""
    found = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in GENERATION_KEYS.items()}
    return {
        name: _shortest(value) if type(value) is float else value for name, value in found.items() if value is not None
    }


def _shortest(value: float) -> float:
    """The decimal that was stored as a 32-bit float: 1e-05 for 9.999999747378752e-06."""
    short = float(f"{value:.7g}")
    try:
        return short if struct.pack("<f", short) == struct.pack("<f", value) else value
    except OverflowError:
        return value
