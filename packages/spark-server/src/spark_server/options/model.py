"""Which model, where its files are, and how they are loaded."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from spark_server.options.spec import Unset, option, switch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    title: ClassVar[str] = "Model"

    model_from_path: Path | Unset = option(
        "Directory or .gguf file to load, without looking at recipes or the cache; MODEL is then only a name.",
        recipe_rank=31,
    )
    model_name: str | Unset = option(
        "Name that the API calls the model; more names separated by commas.",
        default_note="the recipe's or the model's own name",
        aliases=("--served-model-name",),
        recipe_key="served_model_name",
        recipe_rank=8,
    )
    cache_dir: Path | Unset = option(
        "Hugging Face cache to look in.",
        default_note="HF_HUB_CACHE, HF_HOME/hub, ~/.cache/huggingface/hub",
        recipe_rank=32,
    )
    allow_download: bool | Unset = switch(
        "Download a model that is not in the cache; without it nothing is fetched.", in_recipes=False
    )
    load_format: Literal["auto", "safetensors", "gguf"] | Unset = option(
        "Kind of checkpoint that MODEL must be.", default="auto"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | Unset = option(
        "Type of activations, KV cache and unquantised weights; auto lets the model and the device decide.",
        default="auto",
    )
    lm_head_dtype: Literal["default", "bf16", "nvfp4", "fp8"] | Unset = option(
        "Type of the output projection.", default="default", available=False, accepts=("default",), recipe_rank=49
    )
    kernel_target: str | Unset = option(
        "Pin the kernels to one compiled target.", available=False, in_recipes=False, metavar="NAME"
    )
    check_kernels: bool | Unset = switch(
        "Load, look up every kernel, report what is missing, and exit.", available=False, in_recipes=False
    )
    dangerously_allow_unresolved_kernel_lookups: bool | Unset = switch(
        "Serve although kernels are missing.", available=False, in_recipes=False
    )
    no_fast_load: bool | Unset = switch(
        "Read weights through memory maps; this build always does.", available=False, accepts=(True,)
    )
    fast_load_prefetch_shards: bool | Unset = switch(
        "Read the next shard ahead, for network file systems.", available=False
    )
    auto_swap: bool | Unset = switch(
        "Load another model when a request names one that has a recipe.", available=False, in_recipes=False
    )
    no_auto_swap: bool | Unset = switch(
        "Never change the model; this build never does.", available=False, accepts=(True,), in_recipes=False
    )
    warmup_prompt: Path | Unset = option(
        "Prompt file to run into the prefix cache before the first request.", available=False, in_recipes=False
    )
