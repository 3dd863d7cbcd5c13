"""Self-attention of a decoder layer: fused q, k and v projection, optional q/k norms, rotation, paged cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.linear import Linear
from spark_kernels.paged_attention import PagedBatch, paged_attention, write_kv
from spark_kernels.rmsnorm import rmsnorm
from spark_kernels.rope import apply_rope
from spark_model.config import ModelConfig
from spark_model.layers.weights import WeightReader
from spark_runtime.kvcache.pool import KvCache


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention with H query heads over KH key-value heads of size D.

    qkv            [T, hidden] → [T, (H + 2 KH) D]
    output         [T, H D] → [T, hidden]
    q_norm, k_norm [D] each or both None
    """

    qkv: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KvCache, batch: PagedBatch) -> Tensor:
        """x [T, hidden] → [T, hidden]; writes this step's keys and values into `cache` on the way."""
        num_kv_heads, head_dim = self.num_kv_heads, self.head_dim
        width, kv_width = self.num_heads * head_dim, num_kv_heads * head_dim
        q, k, v = torch.split(self.qkv(x), [width, kv_width, kv_width], dim=-1)
        q = q.view(-1, self.num_heads, head_dim)
        k = k.view(-1, num_kv_heads, head_dim)
        v = v.view(-1, num_kv_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = rmsnorm(q, self.q_norm, self.norm_eps)
            k = rmsnorm(k, self.k_norm, self.norm_eps)
        q, k = apply_rope(q, k, *rotation)
        write_kv(k, v, cache.keys, cache.values, batch.slots)
        attended = paged_attention(q, cache.keys, cache.values, batch, head_dim**-0.5)
        return self.output(attended.flatten(1))


def create_attention(
    config: ModelConfig, weights: WeightReader, layer: int, *, has_qk_norm: bool, qkv_bias: bool, output_bias: bool
) -> Attention:
    prefix = f"model.layers.{layer}.self_attn"
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    return Attention(
        qkv=weights.linear(
            [
                (f"{prefix}.q_proj", heads * head_dim, heads),
                (f"{prefix}.k_proj", kv_heads * head_dim, kv_heads),
                (f"{prefix}.v_proj", kv_heads * head_dim, None),
            ],
            config.hidden_size,
            has_bias=qkv_bias,
        ),
        output=weights.linear([(f"{prefix}.o_proj", config.hidden_size, None)], heads * head_dim, has_bias=output_bias),
        q_norm=weights.vector(f"{prefix}.q_norm.weight", head_dim) if has_qk_norm else None,
        k_norm=weights.vector(f"{prefix}.k_norm.weight", head_dim) if has_qk_norm else None,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.norm_eps,
    )
