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
    largest = logits.max()
    if not bool(largest.isfinite()):  # max gives NaN where there is one
        raise KernelError(
            f"sample: the largest logit is {largest.item()}; wanted finite logits and one allowed at least"
        )
    size = logits.shape[0]
    top_k = min(top_k, size) if top_k > 0 else size
    ids = None
    if top_k < size or top_p < 1.0:
        ids = _most_probable(logits, largest, temperature, top_k, top_p)
        logits = logits[ids]
    weights = _weights(logits, largest, temperature)
    if min_p > 0.0:  # the largest weight is 1
        weights.masked_fill_(weights < min_p, 0.0)
    cumulated = weights.cumsum(dim=0)
    index = torch.searchsorted(cumulated, point * cumulated[-1:], right=True)
    return int((index if ids is None else ids[index]).item())


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Unscaled probabilities, 1 for the largest logit; fp64, so that one of 1e-9 still moves the cumulated sum."""
    return ((logits.double() - largest) / temperature).exp_()


def _most_probable(logits: Tensor, largest: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Ids, ascending, of the tokens that top_k and then top_p leave."""
    size = logits.shape[0]
    descending = logits.topk(min(top_k, _CANDIDATES)).values
    weights = _weights(descending, largest, temperature)
    mass = weights.sum() if top_k < size else _weights(logits, largest, temperature).sum()
    if descending.shape[0] < top_k and (top_k < size or bool(weights.sum() <= top_p * mass)):
        descending = logits.sort(descending=True).values[:top_k]
        weights = _weights(descending, largest, temperature)
        mass = weights.sum()
    count = descending.shape[0]
    if top_p < 1.0:  # the fewest tokens whose mass reaches top_p
        count = min(count, int(torch.searchsorted(weights.cumsum(dim=0), top_p * mass).item()) + 1)
    edge = descending[count - 1]
    ids = (logits >= edge).nonzero().squeeze(1)
    at_edge = logits[ids] == edge
    num_at_edge = count - (ids.shape[0] - at_edge.sum())  # how many of those at the edge stay
    return ids[~at_edge | (at_edge.cumsum(dim=0) <= num_at_edge)]
