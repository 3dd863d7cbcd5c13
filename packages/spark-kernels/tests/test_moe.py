import pytest
import torch

from spark_kernels.errors import UnsupportedShapeError
from spark_kernels.moe import moe_forward
from spark_kernels.testing import assert_close

NUM_EXPERTS, HIDDEN, INNER = 6, 32, 24


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5
    return gate_up, torch.randn(NUM_EXPERTS, HIDDEN, INNER) * INNER**-0.5


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (7, 2), (33, 6)])
def test_moe_forward_equals_each_token_alone(num_tokens: int, top_k: int, normalize: bool) -> None:
    gate_up, down = weights()
    x, logits = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, NUM_EXPERTS)
    wanted = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for token in range(num_tokens):
        shares = logits[token].double().exp() / logits[token].double().exp().sum()
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: -shares[e].item())[:top_k]
        scale = sum(shares[e] for e in chosen) if normalize else 1.0
        for expert in chosen:
            gate = gate_up[expert, :INNER].double() @ x[token].double()
            up = gate_up[expert, INNER:].double() @ x[token].double()
            inner = gate / (1 + torch.exp(-gate)) * up
            wanted[token] += shares[expert] / scale * (down[expert].double() @ inner)
    assert_close(moe_forward(x, logits, gate_up, down, top_k, normalize), wanted.float())


def test_moe_forward_wrong_shapes() -> None:
    gate_up, down = weights()
    x, logits = torch.randn(2, HIDDEN), torch.randn(2, NUM_EXPERTS)
    with pytest.raises(UnsupportedShapeError, match="top_k 7"):
        moe_forward(x, logits, gate_up, down, 7, True)
    with pytest.raises(UnsupportedShapeError, match="moe_forward"):
        moe_forward(x, logits[:, :5], gate_up, down, 2, True)
