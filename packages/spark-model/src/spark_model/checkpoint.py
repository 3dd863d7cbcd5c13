"""What a model reference resolves to, and what its files say about the model. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spark_model.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model's files are.

    reference   what the user typed
    name        what the API calls the model unless told otherwise
    kind        "gguf": `path` is the (first) .gguf file; "safetensors": `path` is a directory with config.json
    recipe      the recipe that the reference named, if it named one
    """

    reference: str
    name: str
    kind: Literal["gguf", "safetensors"]
    path: Path
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the checkpoint says about itself, in one vocabulary for both kinds.

    architecture       the Hugging Face class name, e.g. "LlamaForCausalLM"
    config             the Hugging Face style config; for GGUF, made from the metadata
    context_length     tokens the model was made for
    eos_token_ids      every id that ends a turn, from config, generation_config, tokenizer and GGUF metadata
    generation         sampling defaults that the checkpoint ships: temperature, top_p, top_k, min_p, repetition_penalty
    weight_bytes       size of the weights on disk
    """

    architecture: str
    config: Mapping[str, Any]
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, float]
    weight_bytes: int
