"""Qwen3, dense: RMSNorm over each head of q and k."""

from spark_model.config import ModelConfig
from spark_model.layers.attention import Attention, create_attention
from spark_model.layers.decoder import Decoder
from spark_model.layers.mlp import Mlp, create_mlp
from spark_model.layers.weights import WeightReader


class Qwen3(Decoder):
    def create_attention(self, config: ModelConfig, weights: WeightReader, layer: int) -> Attention:
        bias = config.attention_bias
        return create_attention(config, weights, layer, has_qk_norm=True, qkv_bias=bias, output_bias=bias)

    def create_feed_forward(self, config: ModelConfig, weights: WeightReader, layer: int) -> Mlp:
        return create_mlp(config, weights, layer)
