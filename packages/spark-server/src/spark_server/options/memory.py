"""Memory: context length, KV cache, swap."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from spark_server.options.spec import Unset, option, switch, tristate

KvCacheDtype = Literal[
    "bf16",
    "fp8",
    "nvfp4",
    "turbo4",
    "turbo3",
    "turbo2",
    "turbo8",
    "turbo4k_turbo3v",
    "turbo4k_turbo8v",
    "turbo3k_turbo8v",
    "bf16k_turbo4v",
    "bf16k_turbo3v",
    "fp8k_turbo4v",
    "fp8k_turbo3v",
    "bf16k_turbo2v",
    "fp8k_turbo2v",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    title: ClassVar[str] = "Memory and KV cache"

    device: Literal["auto", "cpu", "cuda"] | Unset = option(
        "Where the model runs; auto is the CPU in this build.",
        default="auto",
        available=False,
        accepts=("auto", "cpu"),
        in_recipes=False,
    )
    gpu_ordinal: int | Unset = option("Which GPU.", default=0, minimum=0, available=False, accepts=(0,), recipe_rank=33)
    num_threads: int | Unset = option(
        "CPU threads of the engine.",
        unit="threads",
        default_note="the CPUs that the process may use",
        minimum=1,
        maximum=1024,
        in_recipes=False,
    )
    gpu_memory_utilization: float | Unset = option(
        "Share of the device's memory that the engine may use, weights and KV cache together; on the CPU of the "
        "memory that is free at start. There the KV cache is small unless this option is given.",
        default=0.9,
        above=0.0,
        maximum=1.0,
        recipe_rank=4,
    )
    max_seq_len: int | Unset = option(
        "Longest context, prompt and answer together; the checkpoint's own limit if that is smaller.",
        unit="tokens",
        default=32768,
        minimum=1,
        recipe_key="max_model_len",
        recipe_rank=5,
    )
    block_size: int | Unset = option(
        "Tokens in one KV block.", unit="tokens", default=16, minimum=1, maximum=1024, recipe_rank=12
    )
    kv_cache_dtype: KvCacheDtype | Unset = option(
        "Type of the KV cache. This build keeps it in --dtype, so bf16 goes with --dtype bfloat16.",
        default_note="as --dtype",
        available=False,
        accepts=("bf16",),
        recipe_rank=9,
    )
    kv_high_precision_layers: str | Unset = option(
        "Attention layers at each end whose KV cache stays bf16: a number, auto, or max.",
        default="0",
        available=False,
        accepts=("0",),
        recipe_rank=13,
        metavar="N|auto|max|all",
    )
    fp8_kv_calibration_tokens: int | Unset = option(
        "Tokens over which FP8 KV scales are calibrated.",
        unit="tokens",
        default_note="MODEL.toml, then 0",
        minimum=0,
        available=False,
        accepts=(0,),
        recipe_rank=17,
    )
    fp8_kv_headroom: float | Unset = option(
        "Factor on the first largest value before an FP8 KV scale is fixed.", default=2.0, minimum=1.0, available=False
    )
    oom_guard_mb: int | Unset = option(
        "Memory that must stay free while weights load.",
        unit="MB",
        default=4096,
        minimum=0,
        available=False,
        accepts=(0,),
        recipe_rank=21,
    )
    swap_space_gb: int | Unset = option(
        "Disk for whole sequences that were swapped out.",
        unit="GB",
        default=3,
        minimum=0,
        available=False,
        accepts=(0,),
    )
    high_speed_swap: bool | Unset = switch(
        "Keep only the newest KV blocks of a sequence in memory, the rest on disk.", available=False, recipe_rank=46
    )
    high_speed_swap_dir: Path | Unset = option("Folder of the swapped blocks.", available=False, recipe_rank=34)
    high_speed_swap_gb: int | Unset = option(
        "Disk for the swapped blocks.", unit="GB", minimum=1, available=False, recipe_rank=35
    )
    high_speed_swap_resident_blocks: int | Unset = option(
        "KV blocks of a sequence that stay in memory.", unit="blocks", minimum=1, available=False, recipe_rank=36
    )
    high_speed_swap_rank: int | Unset = option(
        "Rank of the low-rank summary of swapped blocks.", default=32, minimum=1, available=False, recipe_rank=37
    )
    high_speed_swap_qd: int | Unset = option("Reads in flight.", default=8, minimum=1, available=False, recipe_rank=38)
    high_speed_swap_graph: bool | Unset = tristate(
        "Capture the swap path in device graphs.", available=False, accepts=(False,)
    )
    high_speed_swap_cache_blocks_per_seq: int | Unset = option(
        "Fetched blocks that a sequence keeps.",
        unit="blocks",
        default=64,
        minimum=1,
        available=False,
        recipe_rank=39,
    )
