"""A mixture-of-experts block in plain torch: the definition, on any device."""

import torch
from torch import Tensor

from spark_kernels.silu_mul.reference import silu_mul_reference


def route_reference(router_logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights fp32 [T, top_k], experts int64 [T, top_k]): softmax over all experts, then the top_k largest."""
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def moe_forward_reference(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool
) -> Tensor:
    weights, experts = route_reference(router_logits, top_k, normalize)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        tokens, choice = torch.where(experts == expert)
        hidden = silu_mul_reference(x[tokens] @ gate_up[expert].T) @ down[expert].T
        result.index_add_(0, tokens, hidden.float() * weights[tokens, choice, None])
    return result.to(x.dtype)
