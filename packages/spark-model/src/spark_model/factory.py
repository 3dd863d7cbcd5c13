"""Which class computes which architecture. Adding a model is a file in models/ and a row here."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spark_model.config import ModelConfig
from spark_model.errors import UnsupportedModelError
from spark_model.layers.decoder import Decoder, Precision
from spark_model.loaders import WeightSource
from spark_model.nearest import did_you_mean

MODELS = {
    "LlamaForCausalLM": "spark_model.models.llama:Llama",
    "Qwen2ForCausalLM": "spark_model.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "spark_model.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "spark_model.models.qwen3_moe:Qwen3Moe",
}


def create_model(
    config: ModelConfig, weights: WeightSource, *, precision: Precision, device: torch.device | str
) -> Decoder:
    """Build the model of `config.architecture` from a checkpoint's tensors.

    Raises UnsupportedModelError for an unknown architecture, WeightMissingError for a tensor that is missing,
    misshapen or left over.
    """
    model_class = find_model_class(config.architecture)
    with _one_thread():
        return model_class(config, weights, precision=precision, device=torch.device(device))


def find_model_class(architecture: str) -> type[Decoder]:
    """The class of an architecture, which knows its cache and workspace before a weight is read."""
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture `{architecture}` is not in this build.{did_you_mean(architecture, MODELS)}\n"
            f"  hint: known architectures: {', '.join(MODELS)}"
        )
    module_name, class_name = MODELS[architecture].split(":")
    model_class: type[Decoder] = getattr(importlib.import_module(module_name), class_name)
    return model_class


@contextmanager
def _one_thread() -> Iterator[None]:
    """Repacking weights is a thousand short torch calls; handing each to several threads costs more than it gains."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
