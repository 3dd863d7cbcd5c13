"""Linear layers and embeddings in plain torch: the definition, on any device."""

from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N], in fp32, rounded to x.dtype."""
    result = x.float() @ weight.float().T
    return (result if bias is None else result + bias.float()).to(x.dtype)
