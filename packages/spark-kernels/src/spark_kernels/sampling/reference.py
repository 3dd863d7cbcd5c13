"""Drawing a token in plain torch: the definition, on any device.

Filters run in the order of transformers' generate: temperature, top_k, top_p, min_p; each sees the probabilities that
the one before it left, scaled to sum 1. Among equally probable tokens at a filter's edge the lower ids stay.
"""

import torch
from torch import Tensor

from spark_kernels.errors import KernelError

# Most probable tokens looked at before a whole row is sorted: nucleus sampling keeps fewer nearly always.
_CANDIDATES = 1024


def draw_reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, point: float) -> int:
    """The token at `point` (0 < point < 1) of the cumulated filtered distribution, tokens in the order of their ids.

    logits  [V]  -inf where a token may not be drawn; temperature > 0

    Raises KernelError if a logit is NaN or +inf, or none is finite.
    """
    shifted = logits.double() - logits.max()  # fp64: a probability of 1e-9 still moves the cumulated sum
    weights = (shifted / temperature).exp_()
    weights = weights.masked_fill_(~_kept(weights, top_k, top_p, min_p), 0.0)
    cumulated = weights.cumsum(dim=0)
    total = cumulated[-1].item()
    if not 0.0 < total < float("inf"):
        raise KernelError(
            f"sample: the logits give a total weight of {total}; wanted finite logits, one at least allowed"
        )
    return int(torch.searchsorted(cumulated, point * total, right=True).item())


def _kept(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Mask [V] of the tokens that top_k, top_p and min_p leave; weights [V] need not sum to 1."""
    size = weights.shape[0]
    top_k = min(top_k, size) if top_k > 0 else size
    kept = weights >= min_p * weights.max()
    if top_k == size and top_p >= 1.0:
        return kept
    descending, mass = _most_probable(weights, top_k, top_p)
    count = descending.shape[0]
    if top_p < 1.0:  # the fewest tokens whose mass reaches top_p
        count = min(count, int(torch.searchsorted(descending.cumsum(dim=0), top_p * mass).item()) + 1)
    edge = descending[count - 1]
    at_edge = weights == edge
    num_at_edge = count - (weights > edge).sum()
    return kept & ((weights > edge) | (at_edge & (at_edge.cumsum(dim=0) <= num_at_edge)))


def _most_probable(weights: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """(the largest weights in descending order, enough of them for top_k and top_p; the mass of the top_k largest)."""
    size = weights.shape[0]
    largest = weights.topk(min(top_k, _CANDIDATES, size)).values
    if top_k == largest.shape[0]:
        return largest, largest.sum()
    if top_k == size:
        total = weights.sum()
        if bool(largest.sum() > top_p * total):
            return largest, total
    ordered = weights.sort(descending=True).values[:top_k]
    return ordered, ordered.sum()
