"""Qwen3 with experts: Qwen3's attention, a mixture of experts in the layers that the config names."""

from collections.abc import Mapping
from typing import ClassVar

from spark_model.config import ModelConfig
from spark_model.layers.attention import Attention, create_attention
from spark_model.layers.decoder import Decoder
from spark_model.layers.mlp import Mlp, create_mlp
from spark_model.layers.moe import MoeBlock, create_moe
from spark_model.layers.weights import GGUF_LAYER_NAMES, WeightReader


class Qwen3Moe(Decoder):
    gguf_layer_names: ClassVar[Mapping[str, str]] = {
        **GGUF_LAYER_NAMES,
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    def create_attention(self, config: ModelConfig, weights: WeightReader, layer: int) -> Attention:
        bias = config.attention_bias
        return create_attention(config, weights, layer, has_qk_norm=True, qkv_bias=bias, output_bias=bias)

    def create_feed_forward(self, config: ModelConfig, weights: WeightReader, layer: int) -> Mlp | MoeBlock:
        if config.moe is not None and config.moe.is_sparse(layer):
            return create_moe(config, config.moe, weights, layer)
        return create_mlp(config, weights, layer)
