"""From a checkpoint's tensors to a model's parameters: names, shapes, row order, and nothing left over."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spark_kernels.ggml import GgmlTensor
from spark_kernels.linear import Linear, create_linear
from spark_model.errors import WeightMissingError
from spark_model.loaders import WeightSource, missing_weight
from spark_model.nearest import nearest

# Hugging Face name without its ending → GGUF name, outside of layers and inside of one.
GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

ROPE_DIVISORS = "rope_freqs.weight"

# Tables that older converters stored and that follow from the config.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".attn_rot_embd.weight")


class WeightReader:
    """Hands out parameters by Hugging Face name from either kind of checkpoint, and knows what nobody asked for.

    layer_names         GGUF names inside a layer
    interleaved_heads   the GGUF file stores q and k rows for interleaved rotation; they are put back in half-split order
    weight_bytes        what the parameters handed out so far take at least, in `dtype` or in their blocks
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layer_names: Mapping[str, str],
        interleaved_heads: bool,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._all_names = frozenset(source.names())
        self.is_gguf = "token_embd.weight" in self._all_names or any(n.startswith("blk.") for n in self._all_names)
        self._layer_names = layer_names
        self._interleaved = interleaved_heads and self.is_gguf
        self._used: set[str] = set()
        self.weight_bytes = 0

    def stored_name(self, name: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` → `blk.3.ffn_up.weight` in a GGUF file, else unchanged."""
        if not self.is_gguf:
            return name
        stem, _, ending = name.rpartition(".")
        if stem in GGUF_NAMES:
            return f"{GGUF_NAMES[stem]}.{ending}"
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{self._layer_names[part]}.{ending}"

    def has(self, name: str) -> bool:
        return self.stored_name(name) in self._all_names

    def vector(self, name: str, size: int, *, heads: int | None = None) -> Tensor:
        """A norm weight or a bias, [size] fp32. Raises WeightMissingError if it is missing or misshapen."""
        stored = self._take(name, (size,))
        vector = self.source.tensor(stored).to(torch.float32)
        if heads is not None and self._interleaved:
            vector = vector[half_split_rows(size, heads)]
        self.weight_bytes += vector.numel() * 4
        return vector.to(self.device)

    def matrix(self, name: str, rows: int, columns: int, *, heads: int | None = None) -> Tensor | GgmlTensor:
        """A weight [rows, columns], in its blocks where the file has it quantised.

        heads   of a q or k projection, whose rows may have to be put in order
        """
        stored = self._take(name, (rows, columns))
        blocks = self.source.blocks(stored)
        order = half_split_rows(rows, heads) if heads is not None and self._interleaved else None
        if blocks is not None:
            self.weight_bytes += blocks.data.numel()
            return blocks if order is None else blocks.select_rows(order)
        tensor = self.source.tensor(stored)
        self.weight_bytes += tensor.numel() * self.dtype.itemsize
        return tensor if order is None else tensor[order]

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight as numbers of `dtype`, on the model's device, whatever the file holds."""
        stored = self._take(name, shape)
        tensor = self.source.tensor(stored).to(device=self.device, dtype=self.dtype)
        self.weight_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def linear(self, parts: Sequence[tuple[str, int, int | None]], columns: int, *, has_bias: bool) -> Linear:
        """One linear layer over the concatenated rows of `parts`: (name without ending, rows, heads as in `matrix`)."""
        matrices = [self.matrix(f"{name}.weight", rows, columns, heads=heads) for name, rows, heads in parts]
        bias = None
        if has_bias:
            bias = torch.cat([self.vector(f"{name}.bias", rows, heads=heads) for name, rows, heads in parts])
        return create_linear(matrices, dtype=self.dtype, device=self.device, bias=bias)

    def rope_divisors(self, size: int) -> Tensor | None:
        """`rope_freqs.weight` of a GGUF file, [size], if it has one."""
        if ROPE_DIVISORS not in self._all_names:
            return None
        self._check(ROPE_DIVISORS, (size,))
        self._used.add(ROPE_DIVISORS)
        return self.source.tensor(ROPE_DIVISORS).to(torch.float32)

    def check_all_used(self) -> None:
        """Raise WeightMissingError if the checkpoint holds a tensor that the model has no place for."""
        unknown = sorted(name for name in self._all_names - self._used if not name.endswith(_IGNORED_ENDINGS))
        if not unknown:
            return
        name = unknown[0]
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        close = nearest(name, self._used, count=1)
        hint = f"the nearest name that it has is `{close[0]}`; " if close else ""
        raise WeightMissingError(
            f"{self.source.file(name)}: the model has no place for tensor `{name}`{others}\n"
            f"  hint: {hint}the config and the weights may belong to different models"
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> str:
        stored = self.stored_name(name)
        self._check(stored, shape)
        self._used.add(stored)
        return stored

    def _check(self, stored: str, wanted: tuple[int, ...]) -> None:
        if stored not in self._all_names or tuple(self.source.shape(stored)) != wanted:
            raise missing_weight(self.source, stored, wanted)


def half_split_rows(rows: int, heads: int) -> Tensor:
    """Index that turns rows stored for interleaved rotation (pairs side by side) into half-split order, head by head."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
