"""Drawing the next tokens from logits, each row with its own parameters and its own random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spark_kernels.errors import KernelError, UnsupportedShapeError
from spark_kernels.sampling.philox import uniform
from spark_kernels.sampling.reference import draw_reference

__all__ = ["SamplingRow", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row's token is drawn.

    temperature 0 is greedy: the allowed id of the largest logit, the lowest of several. top_k 0, top_p 1.0 and
    min_p 0.0 switch their filter off. The random number is a pure function of (seed, position).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    forbidden: Sequence[int] = ()


def sample(logits: Tensor, params: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row; a row's token depends on nothing but its own logits and parameters.

    logits  [B, V]  any float dtype, not changed

    Raises UnsupportedShapeError if B is not len(params), KernelError if a row allows no token or has a NaN.
    """
    if logits.ndim != 2 or logits.shape[0] != len(params):
        raise UnsupportedShapeError(f"sample: logits {tuple(logits.shape)} for {len(params)} rows; wanted [B, V]")
    if any(row.forbidden for row in params):
        logits = logits.clone()
        for index, row in enumerate(params):
            if row.forbidden:
                logits[index, list(row.forbidden)] = float("-inf")
    is_greedy = [row.temperature == 0.0 for row in params]
    tokens: list[int] = logits.argmax(dim=-1).tolist() if any(is_greedy) else [0] * len(params)
    for index, row in enumerate(params):
        if not is_greedy[index]:
            point = uniform(row.seed, row.position)
            tokens[index] = draw_reference(logits[index], row.temperature, row.top_k, row.top_p, row.min_p, point)
        elif row.forbidden and logits[index, tokens[index]].item() == float("-inf"):
            raise KernelError(f"sample: row {index} allows no token; {len(row.forbidden)} ids are forbidden")
    return tokens
