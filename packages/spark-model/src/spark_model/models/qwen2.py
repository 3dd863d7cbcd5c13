"""Qwen2 and Qwen2.5: always biases on q, k and v, none on the output."""

from spark_model.config import ModelConfig
from spark_model.layers.attention import Attention, create_attention
from spark_model.layers.decoder import Decoder
from spark_model.layers.mlp import Mlp, create_mlp
from spark_model.layers.weights import WeightReader


class Qwen2(Decoder):
    def create_attention(self, config: ModelConfig, weights: WeightReader, layer: int) -> Attention:
        return create_attention(config, weights, layer, has_qk_norm=False, qkv_bias=True, output_bias=False)

    def create_feed_forward(self, config: ModelConfig, weights: WeightReader, layer: int) -> Mlp:
        return create_mlp(config, weights, layer)
