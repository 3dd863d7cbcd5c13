"""Helpers of the tests: random tiny models by transformers, written as GGUF files, and runs through the paged cache.

transformers and gguf are test dependencies: they are imported where they are used.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spark_model.layers.decoder import Decoder
from spark_model.runner import build_batch
from spark_runtime.kvcache.pool import KvPool
from spark_runtime.types import BlockId, SequenceId, SequenceStep

TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TINY_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

_GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


def create_tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in fp32 with weights large enough that a wrong one shows in the logits."""
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    shape = TINY_SHAPE | (TINY_MOE if "Moe" in architecture else {}) | overrides
    config = config_class(**shape, attn_implementation="eager")
    model = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim == 1 or "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of one sequence in one piece."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def paged_logits(
    model: Decoder, sequences: Sequence[Sequence[int]], chunks: Sequence[int], *, block_size: int = 4, seed: int = 0
) -> list[Tensor]:
    """Logits [T, V] of each sequence, all run together, sequence i in chunks of chunks[i % len(chunks)] tokens.

    The sequences' blocks lie scattered over a pool that is larger than needed and full of NaN.
    """
    pages = [-(-len(tokens) // block_size) for tokens in sequences]
    pool = KvPool.create(
        model.kv_shapes(model.config),
        num_blocks=sum(pages) + 5,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
    )
    for cache in pool:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    order = np.random.default_rng(seed).permutation(pool.num_blocks)
    tables = [order[sum(pages[:index]) : sum(pages[: index + 1])].tolist() for index in range(len(pages))]
    results: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(done[index] < len(tokens) for index, tokens in enumerate(sequences)):
        steps = []
        for index, tokens in enumerate(sequences):
            chunk = tokens[done[index] : done[index] + chunks[index % len(chunks)]]
            if chunk:
                blocks = [BlockId(block) for block in tables[index]]
                steps.append(SequenceStep(SequenceId(index), chunk, done[index], blocks, sampling=None))
        batch, token_ids, positions = build_batch(steps, block_size, model.device)
        logits = model.forward(token_ids, positions, pool, batch)
        for step, part in zip(steps, torch.split(logits, [len(step.token_ids) for step in steps]), strict=True):
            results[step.sequence].append(part)
            done[step.sequence] += len(step.token_ids)
    return [torch.cat(parts) for parts in results]


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference as a share of the range of `wanted`; infinite where `got` has a NaN."""
    spread = (wanted.max() - wanted.min()).item()
    difference = (got.float() - wanted.float()).abs().max().item()
    return float("inf") if math.isnan(difference) else difference / spread


def write_gguf(
    path: Path, model: Any, *, quantization: str = "F32", without: Sequence[str] = (), permute: bool = True
) -> None:
    """Write a transformers model as llama.cpp's converter would: names, metadata, and llama's order of q and k rows.

    quantization   ggml type of the matrices whose columns divide into its blocks; `model` then gets what these
                   blocks say, so that it stays the oracle
    without        GGUF names to leave out
    permute        False plants a fault: rows of q and k in the order of the Hugging Face file
    """
    import gguf

    config = model.config
    architecture = _GGUF_ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    names = gguf.get_tensor_name_map(_gguf_id(architecture), config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    for hf_name, values in _arrays(model).items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        if name in without:
            continue
        is_quantised = quantization != "F32" and values.ndim > 1 and values.shape[-1] % block_size == 0
        stored = np.ascontiguousarray(values)
        if is_quantised:
            stored = gguf.quants.quantize(stored, kind)
            values[...] = gguf.quants.dequantize(stored, kind)  # a view of the model's parameter
        if permute and architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            halves = stored.reshape(heads, 2, stored.shape[0] // heads // 2, *stored.shape[1:])
            stored = halves.swapaxes(1, 2).reshape(stored.shape)
        writer.add_tensor(name, stored, raw_dtype=kind if is_quantised else None)
    if config.rope_parameters["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(len(frequencies)) / len(frequencies))
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arrays(model: Any) -> dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]:
    """Views of all parameters by Hugging Face name; the experts' gate and up apart. A tied head is not there."""
    arrays = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if name.endswith("experts.gate_up_proj"):
            stem, width = name.removesuffix("gate_up_proj"), array.shape[1] // 2
            arrays[f"{stem}gate_proj.weight"] = array[:, :width]
            arrays[f"{stem}up_proj.weight"] = array[:, width:]
        elif name.endswith("experts.down_proj"):
            arrays[f"{name}.weight"] = array
        else:
            arrays[name] = array
    return arrays


def _gguf_id(architecture: str) -> Any:
    import gguf

    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _write_metadata(writer: Any, config: Any) -> None:
    import gguf

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_eos_token_id(config.vocab_size - 1)
