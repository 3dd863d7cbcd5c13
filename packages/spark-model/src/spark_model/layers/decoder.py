"""The decoder frame that the models share: embedding, layers of attention and feed-forward, final norm, head.

A model is this frame with its own parts: a subclass says how a layer's attention and feed-forward are made.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor
from spark_kernels.linear import Linear, create_embedding, create_linear
from spark_kernels.paged_attention import PagedBatch
from spark_kernels.rmsnorm import add_rmsnorm, rmsnorm
from spark_kernels.rope import widen_tables
from spark_model.config import ModelConfig
from spark_model.layers.attention import Attention
from spark_model.layers.rope import RotaryEmbedding
from spark_model.layers.weights import GGUF_LAYER_NAMES, WeightReader
from spark_model.loaders import WeightSource
from spark_runtime.kvcache.pool import KvCache, KvShape


@dataclass(frozen=True, slots=True)
class Precision:
    """weights: what linear layers may round dense ones to, or keep smaller; cache: keys, values; activations: all else."""

    weights: torch.dtype
    activations: torch.dtype
    cache: torch.dtype


class FeedForward(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] → [T, hidden]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """input_norm, attention_norm [hidden]: what is applied before attention and before the feed-forward block."""

    input_norm: Tensor
    attention: Attention
    attention_norm: Tensor
    feed_forward: FeedForward


class Decoder(ABC):
    """A decoder-only language model: token ids in, logits out, keys and values in a paged cache."""

    gguf_layer_names: ClassVar[Mapping[str, str]] = GGUF_LAYER_NAMES
    # llama.cpp's converter reorders q and k rows of this architecture for interleaved rotation.
    gguf_interleaves_heads: ClassVar[bool] = False

    def __init__(
        self, config: ModelConfig, source: WeightSource, *, precision: Precision, device: torch.device
    ) -> None:
        """Take every tensor that the config asks for. Raises WeightMissingError naming the first that does not fit."""
        weights = WeightReader(
            source,
            dtype=precision.weights,
            device=device,
            layer_names=self.gguf_layer_names,
            interleaved_heads=self.gguf_interleaves_heads,
        )
        self.config = config
        self.dtype = precision.activations
        self.device = device
        embedding = weights.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = create_embedding(embedding, dtype=precision.activations, device=device)
        self._layers = [self._create_layer(config, weights, layer) for layer in range(config.num_layers)]
        self._final_norm = weights.vector("model.norm.weight", config.hidden_size)
        self._head = _create_head(config, weights, embedding)
        divisors = weights.rope_divisors(config.rope.rotary_dim // 2)
        self._rotary = RotaryEmbedding(config.rope, device=device, frequency_divisors=divisors)
        weights.check_all_used()
        self.weight_bytes = weights.weight_bytes

    @abstractmethod
    def create_attention(self, config: ModelConfig, weights: WeightReader, layer: int) -> Attention: ...

    @abstractmethod
    def create_feed_forward(self, config: ModelConfig, weights: WeightReader, layer: int) -> FeedForward: ...

    @classmethod
    def kv_shapes(cls, config: ModelConfig) -> list[KvShape]:
        """The cache that each layer needs."""
        return [KvShape(config.num_kv_heads, config.head_dim)] * config.num_layers

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[KvCache],
        batch: PagedBatch,
        logit_rows: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Run T tokens of any mix of sequences and return logits [R, V] in the activations' dtype.

        token_ids, positions   int64 [T]
        caches                 one per layer; this step's keys and values are written to batch.slots
        logit_rows             int64 [R], the tokens whose logits are wanted; None = all T
        hidden_states          receives the residual stream after each layer, [T, hidden], before the final norm
        """
        rotation = widen_tables(*self._rotary(positions))
        norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        residual = self._embedding(token_ids)
        x = rmsnorm(residual, self._layers[0].input_norm, self.config.norm_eps)
        for layer, cache, next_norm in zip(self._layers, caches, norms, strict=True):
            x = layer.attention(x, rotation, cache, batch)
            if layer is self._layers[-1] and logit_rows is not None and hidden_states is None:
                x, residual = x[logit_rows], residual[logit_rows]  # nothing else of the last layer is looked at
            x, residual = add_rmsnorm(x, residual, layer.attention_norm, self.config.norm_eps)
            x = layer.feed_forward(x)
            x, residual = add_rmsnorm(x, residual, next_norm, self.config.norm_eps)
            if hidden_states is not None:
                hidden_states.append(residual)
        is_selected = logit_rows is None or hidden_states is None
        return self._head(x if is_selected else x[logit_rows])

    @classmethod
    def workspace_bytes(cls, config: ModelConfig, *, num_tokens: int, num_rows: int, context_length: int) -> int:
        """Upper estimate of what one step needs besides weights and cache: activations, attention scores, logits.

        Counted in fp32: the maths of norms, attention and sampling is, whatever the model's dtype.
        """
        heads_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        width = config.intermediate_size
        if config.moe is not None:
            width = max(width, config.moe.top_k * config.moe.intermediate_size)
        activations = num_tokens * (4 * config.hidden_size + 2 * heads_width + 4 * width)
        scores = 2 * config.num_heads * num_tokens * context_length
        gathered = 2 * config.num_heads * config.head_dim * context_length  # keys and values of one sequence
        logits = 3 * num_rows * config.vocab_size  # themselves, an fp32 copy, the sampler's sort
        return 4 * (activations + scores + gathered + logits)

    def _create_layer(self, config: ModelConfig, weights: WeightReader, layer: int) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        return DecoderLayer(
            input_norm=weights.vector(f"{prefix}.input_layernorm.weight", config.hidden_size),
            attention=self.create_attention(config, weights, layer),
            attention_norm=weights.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            feed_forward=self.create_feed_forward(config, weights, layer),
        )


def _create_head(config: ModelConfig, weights: WeightReader, embedding: Tensor | GgmlTensor) -> Linear:
    """The head's own weight, or the embedding's.

    A GGUF file ties by leaving `output.weight` out. A config that ties beside a stored head is right only if both are
    equal; otherwise the stored head counts, as in transformers.
    """
    head: Tensor | GgmlTensor = embedding
    is_stored = weights.has("lm_head.weight")
    if is_stored or not (config.tie_embeddings or weights.is_gguf):
        head = weights.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
        if config.tie_embeddings and isinstance(head, Tensor) and isinstance(embedding, Tensor):
            head = embedding if torch.equal(head, embedding) else head
    return create_linear([head], dtype=weights.dtype, device=weights.device)
