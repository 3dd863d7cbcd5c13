"""What a model's shape is: a Hugging Face config, read once, checked and frozen. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from spark_model.checkpoint import ModelFacts
from spark_model.errors import CheckpointError, UnsupportedModelError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# Scaled variants that stretch from the length of the pre-training.
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` dims of a head.

    original_length    positions of the pre-training; "dynamic" is exact up to it and refused beyond
    attention_factor   yarn: multiplies cos and sin; None = derived from factor, mscale and mscale_all_dim
    """

    type: RopeType
    theta: float
    rotary_dim: int
    original_length: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts in place of the MLP, in every `sparse_step`-th layer that `dense_layers` does not name."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    sparse_step: int
    dense_layers: frozenset[int]

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. Sizes in elements; `head_dim` need not be hidden_size / num_heads."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    moe: MoeConfig | None = None

    @classmethod
    def from_facts(cls, facts: ModelFacts) -> "ModelConfig":
        """As `from_hf`, with the architecture that the facts derived where the config names none."""
        return cls.from_hf({**facts.config, "architectures": [facts.architecture]})

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face config (also one made from GGUF metadata).

        Raises UnsupportedModelError for what this build does not compute, CheckpointError for a missing or absurd value.
        """
        read = _Reader(config)
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        hidden_size = read.size("hidden_size")
        num_heads = read.size("num_attention_heads")
        num_kv_heads = read.size("num_key_value_heads", num_heads)
        head_dim = read.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config: {num_heads} query heads are not a multiple of {num_kv_heads} key-value heads"
            )
        return cls(
            architecture=architecture,
            vocab_size=read.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.size("intermediate_size"),
            num_layers=read.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=read.number("rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings") or False),
            attention_bias=bool(config.get("attention_bias") or False),
            mlp_bias=bool(config.get("mlp_bias") or False),
            rope=_read_rope(config, head_dim),
            moe=_read_moe(config),
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access; a value that is null or absent takes the default, or is an error without one."""

    config: Mapping[str, Any]
    place: str = "config"

    def number(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.place}: `{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.place}: `{key}` is {value!r}, expected a number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise CheckpointError(f"{self.place}: `{key}` is {value!r}, expected a whole number of at least 1")
        return int(value)

    def optional(self, key: str) -> float | None:
        return None if self.config.get(key) is None else self.number(key)


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list | tuple) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(
            f"config: `architectures` is {architectures!r}, expected a list with the model's class name"
        )
    return architectures[0]


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else "unreadable"
        raise UnsupportedModelError(
            f"{architecture}: quantization_config with method `{method}` is not available in this build\n"
            "  hint: use the unquantised checkpoint or a GGUF file"
        )
    sliding_layers = "sliding_attention" in (config.get("layer_types") or ())
    if sliding_layers or (config.get("use_sliding_window") and config.get("sliding_window")):
        window = config.get("sliding_window")
        raise UnsupportedModelError(f"{architecture}: sliding-window attention (window {window}) is not in this build")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{architecture}: activation `{activation}` is not in this build, only `silu` is")


def _read_rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), else `rope_theta` with `rope_scaling` (transformers 4)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    read = _Reader(parameters, "config.rope_parameters")
    outer = _Reader(config)
    kind = _rope_type(parameters.get("rope_type") or parameters.get("type") or "default")
    max_length = outer.size("max_position_embeddings", 2048)
    original_length = max_length
    if kind in _WITH_ORIGINAL_LENGTH:
        inner = read.size("original_max_position_embeddings", max_length)
        original_length = outer.size("original_max_position_embeddings", inner)
    factor = 1.0 if kind == "default" else read.optional("factor")
    if factor is None:
        if kind != "yarn":
            raise CheckpointError(f"config.rope_parameters: `factor` is missing (RoPE type {kind!r})")
        factor = max_length / original_length
    partial = read.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
    if factor <= 0 or not 0 < partial <= 1:
        raise CheckpointError(
            f"config.rope_parameters: factor {factor} or partial_rotary_factor {partial} is out of range"
        )
    return RopeConfig(
        type=kind,
        theta=float(read.number("rope_theta", outer.number("rope_theta", 10000.0))),
        rotary_dim=int(head_dim * partial),
        original_length=original_length,
        factor=float(factor),
        low_freq_factor=float(read.number("low_freq_factor", 1.0)),
        high_freq_factor=float(read.number("high_freq_factor", 4.0)),
        attention_factor=read.optional("attention_factor"),
        mscale=read.optional("mscale"),
        mscale_all_dim=read.optional("mscale_all_dim"),
        beta_fast=float(read.number("beta_fast", 32.0)),
        beta_slow=float(read.number("beta_slow", 1.0)),
        truncate=bool(parameters.get("truncate", True)),
    )


def _rope_type(name: object) -> RopeType:
    known: tuple[RopeType, ...] = get_args(RopeType)
    for kind in known:
        if kind == name:
            return kind
    raise UnsupportedModelError(f"config: RoPE type {name!r} is not in this build; known types: {', '.join(known)}")


def _read_moe(config: Mapping[str, Any]) -> MoeConfig | None:
    read = _Reader(config)
    # transformers 5 writes `num_local_experts` where version 4 wrote `num_experts`.
    num_experts = read.optional("num_local_experts") or read.optional("num_experts")
    if not num_experts:
        return None
    dense_layers = config.get("mlp_only_layers") or ()
    moe = MoeConfig(
        num_experts=int(num_experts),
        top_k=read.size("num_experts_per_tok"),
        intermediate_size=read.size("moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob") or False),
        sparse_step=read.size("decoder_sparse_step", 1),
        dense_layers=frozenset(int(layer) for layer in dense_layers),
    )
    if moe.top_k > moe.num_experts:
        raise CheckpointError(f"config: num_experts_per_tok {moe.top_k} exceeds the {moe.num_experts} experts")
    return moe
