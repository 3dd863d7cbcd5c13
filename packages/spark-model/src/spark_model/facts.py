"""What a checkpoint says about itself, read from its small files. No torch."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.errors import CheckpointError, UnsupportedModelError
from spark_model.gguf import GgufFile
from spark_model.gguf_config import config_from_gguf, eos_ids_from_gguf, generation_from_gguf
from spark_model.json_files import read_json_object
from spark_model.safetensors_header import weight_files

# Hugging Face model_type → the architecture of this build.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

# Tokens that end a turn in the common chat formats; a checkpoint often lists only one of those that its model writes.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_facts(checkpoint: Checkpoint) -> ModelFacts:
    """Raises UnsupportedModelError for an architecture or feature that this build lacks, CheckpointError for bad files."""
    if checkpoint.kind == "gguf":
        return _gguf_facts(checkpoint.path)
    return _safetensors_facts(checkpoint.path)


def _gguf_facts(path: Path) -> ModelFacts:
    with GgufFile(path) as gguf:
        config = config_from_gguf(gguf)
        return ModelFacts(
            architecture=config["architectures"][0],
            config=config,
            context_length=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            eos_token_ids=_in_vocabulary(eos_ids_from_gguf(gguf, TURN_ENDS), config["vocab_size"]),
            generation=_finite(generation_from_gguf(gguf)),
            weight_bytes=sum(info.size for info in gguf.tensors.values()),
        )


def _safetensors_facts(directory: Path) -> ModelFacts:
    path = directory / "config.json"
    config = read_json_object(path)
    architecture = _architecture(config, path)
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{path}: weights quantised with {str(method)[:40]!r} are not in this build\n"
            "  hint: serve the bf16 checkpoint, or a GGUF file of the model"
        )
    generation = _optional_json(directory / "generation_config.json")
    vocab_size = _count(config, "vocab_size", path)
    eos_ids = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id")), *_tokenizer_eos_ids(directory)]
    return ModelFacts(
        architecture=architecture,
        config=config,
        context_length=_count(config, "max_position_embeddings", path),
        vocab_size=vocab_size,
        eos_token_ids=_in_vocabulary(eos_ids, vocab_size),
        generation=_finite({key: generation[key] for key in GENERATION_KEYS if key in generation}),
        weight_bytes=sum(file.stat().st_size for file in weight_files(directory)),
    )


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    names = config.get("architectures") or [ARCHITECTURES.get(str(config.get("model_type")), config.get("model_type"))]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: neither `architectures` nor `model_type` names the model")
    if name not in ARCHITECTURES.values():
        supported = ", ".join(ARCHITECTURES.values())
        raise UnsupportedModelError(f"{path}: architecture {name[:80]!r} is not in this build, it has {supported}")
    return name


def _count(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: `{key}` is {str(value)[:40]!r}, wanted a whole number of at least 1")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    """An id or a list of ids, as configs write them; None is none."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if type(entry) is int]


def _tokenizer_eos_ids(directory: Path) -> list[int]:
    config = _optional_json(directory / "tokenizer_config.json")
    added = config.get("added_tokens_decoder")
    ids: dict[str, int] = {}
    if isinstance(added, dict):
        ids = {str(_content(token)): int(id) for id, token in added.items() if id.isascii() and id.isdigit()}
    else:
        tokens = _optional_json(directory / "tokenizer.json").get("added_tokens")
        entries = tokens if isinstance(tokens, list) else []
        ids = {str(_content(token)): token["id"] for token in entries if isinstance(token, dict) and "id" in token}
    wanted = [_content(config.get("eos_token")), *TURN_ENDS]
    return _ids([ids[token] for token in wanted if token in ids])


def _content(token: Any) -> Any:
    """A token is written as its text or as an object that describes it."""
    return token.get("content") if isinstance(token, dict) else token


def _in_vocabulary(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Each id once, in order; ids that the model cannot produce are left out."""
    return tuple(dict.fromkeys(id for id in ids if 0 <= id < vocab_size))


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}
