"""The dense feed-forward block: SwiGLU with gate and up in one projection."""

from dataclasses import dataclass

from torch import Tensor

from spark_kernels.linear import Linear
from spark_kernels.silu_mul import silu_mul
from spark_model.config import ModelConfig
from spark_model.layers.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Mlp:
    """gate_up [T, hidden] → [T, 2 I]; down [T, I] → [T, hidden]."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


def create_mlp(config: ModelConfig, weights: WeightReader, layer: int) -> Mlp:
    prefix, width = f"model.layers.{layer}.mlp", config.intermediate_size
    gate_up = [(f"{prefix}.gate_proj", width, None), (f"{prefix}.up_proj", width, None)]
    down = [(f"{prefix}.down_proj", config.hidden_size, None)]
    return Mlp(
        gate_up=weights.linear(gate_up, config.hidden_size, has_bias=config.mlp_bias),
        down=weights.linear(down, width, has_bias=config.mlp_bias),
    )
