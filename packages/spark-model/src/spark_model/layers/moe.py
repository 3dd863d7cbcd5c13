"""The mixture-of-experts block: a router and the experts' weights in two tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spark_kernels.linear import Linear
from spark_kernels.moe import moe_forward
from spark_model.config import ModelConfig, MoeConfig
from spark_model.layers.weights import WeightReader


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """router [T, hidden] → [T, E]; gate_up [E, 2 I, hidden]; down [E, hidden, I]."""

    router: Linear
    gate_up: Tensor
    down: Tensor
    top_k: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        narrow = x.to(self.gate_up.dtype)
        return moe_forward(narrow, self.router(x), self.gate_up, self.down, self.top_k, self.normalize).to(x.dtype)


def create_moe(config: ModelConfig, moe: MoeConfig, weights: WeightReader, layer: int) -> MoeBlock:
    """Experts are dense tensors of the weights' dtype, also where the file has them quantised."""
    prefix = f"model.layers.{layer}.mlp"
    experts, width, hidden = moe.num_experts, moe.intermediate_size, config.hidden_size
    gate_up = torch.empty(experts, 2 * width, hidden, dtype=weights.dtype, device=weights.device)
    down = torch.empty(experts, hidden, width, dtype=weights.dtype, device=weights.device)
    _fill_experts(gate_up[:, :width], f"{prefix}.experts", "gate_proj", weights)
    _fill_experts(gate_up[:, width:], f"{prefix}.experts", "up_proj", weights)
    _fill_experts(down, f"{prefix}.experts", "down_proj", weights)
    router = weights.linear([(f"{prefix}.gate", experts, None)], hidden, has_bias=False)
    return MoeBlock(router, gate_up, down, moe.top_k, moe.normalize)


def _fill_experts(out: Tensor, prefix: str, part: str, weights: WeightReader) -> None:
    """Copy one matrix of every expert into `out` [E, rows, columns]: one stacked tensor in GGUF, E tensors otherwise."""
    if weights.is_gguf:
        out.copy_(weights.dense(f"{prefix}.{part}.weight", tuple(out.shape)))
        return
    for expert, matrix in enumerate(out):
        matrix.copy_(weights.dense(f"{prefix}.{expert}.{part}.weight", tuple(matrix.shape)))
