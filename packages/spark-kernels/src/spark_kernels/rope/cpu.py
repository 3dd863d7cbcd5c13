"""Rotary position embedding on the CPU, whole heads: the halves change places by one roll."""

from torch import Tensor


def rotate_cpu(q: Tensor, k: Tensor, wide_cos: Tensor, wide_sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rotate_reference` on q and k; wide_cos, wide_sin [T, 1, D] come from `widen_tables`.

    Neighbours in one projection are turned together, which halves the calls.
    """
    num_tokens, num_heads, head_dim = q.shape
    is_fused = k.data_ptr() == q.data_ptr() + num_heads * head_dim * q.element_size() and q.stride() == k.stride()
    if not is_fused:
        return _rotate(q, wide_cos, wide_sin), _rotate(k, wide_cos, wide_sin)
    both = q.as_strided((num_tokens, num_heads + k.shape[1], head_dim), q.stride())
    turned = _rotate(both, wide_cos, wide_sin)
    return turned[:, :num_heads], turned[:, num_heads:]


def _rotate(x: Tensor, wide_cos: Tensor, wide_sin: Tensor) -> Tensor:
    wide = x.float()
    return (wide * wide_cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), wide_sin).to(x.dtype)
