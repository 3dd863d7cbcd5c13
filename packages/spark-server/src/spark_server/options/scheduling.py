"""How requests share the engine, and what is kept between them."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_server.options.spec import Unset, option, switch, tristate


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    title: ClassVar[str] = "Scheduling and batching"

    max_batch_size: int | Unset = option(
        "Sequences in one decode step.", unit="sequences", default=8, minimum=1, maximum=4096, recipe_rank=11
    )
    max_num_seqs: int | Unset = option(
        "Sequences that the scheduler holds, running or waiting.",
        unit="sequences",
        default=128,
        minimum=1,
        recipe_rank=6,
    )
    max_prefill_tokens: int | Unset = option(
        "Prompt tokens in one step; longer prompts are cut. 0 runs a prompt in one piece.",
        unit="tokens",
        default_note="512 on the CPU",
        minimum=0,
        recipe_aliases=("max_num_batched_tokens",),
        recipe_rank=20,
    )
    scheduling_policy: Literal["fifo", "slai"] | Unset = option(
        "Order of requests: fifo, or slai, which holds prompts back while decode is late.",
        default="fifo",
        available=False,
        accepts=("fifo",),
        recipe_rank=18,
    )
    tbt_deadline_ms: int | Unset = option(
        "Time between tokens that slai defends.", unit="ms", default=100, minimum=1, available=False, recipe_rank=19
    )
    prefill_varlen_batch: bool | Unset = tristate(
        "Run prompts of different lengths in one forward pass.",
        default_note="off",
        available=False,
        accepts=(False,),
        recipe_rank=55,
    )
    auto_compact: float | Unset = option(
        "Shorten a conversation that fills this share of the context; the name alone is 0.75.",
        default_note="off",
        above=0.0,
        maximum=1.0,
        bare="0.75",
        bare_needs_equals=True,
        available=False,
        in_recipes=False,
    )
    deterministic: bool | Unset = switch(
        "Same tokens whatever else runs, at the price of speed.", available=False, in_recipes=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    title: ClassVar[str] = "Prefix cache and recurrent state"

    enable_prefix_caching: bool | Unset = switch(
        "Reuse the KV blocks of prompts that start alike.",
        negatable=True,
        default_note="off",
        available=False,
        recipe_rank=40,
    )
    ssm_cache_slots: int | Unset = option(
        "Snapshots of recurrent state; 0 keeps none.",
        default=16,
        minimum=0,
        available=False,
        accepts=(0,),
        recipe_rank=22,
    )
    ssm_checkpoint_interval: int | Unset = option(
        "KV blocks between two snapshots; 0 takes them at turn ends only.",
        unit="blocks",
        default=256,
        minimum=0,
        available=False,
        recipe_rank=23,
    )
    ssm_h_dtype: Literal["f32", "f16", "f16-pool"] | Unset = option(
        "Type of recurrent state.", default_note="f32", available=False, accepts=("f32",), recipe_rank=50
    )
    ssm_rollback_mode: Literal["snapshot", "replay"] | Unset = option(
        "How recurrent state is taken back after rejected drafts.", default="snapshot", available=False
    )
    gdn_fused_norm: bool | Unset = tristate(
        "Fuse the output norm into Gated DeltaNet.",
        default_note="off",
        available=False,
        accepts=(False,),
        recipe_rank=51,
    )
    ssm_batched_recurrent: bool | Unset = tristate(
        "One launch a batch for Gated DeltaNet decode.",
        default_note="off",
        available=False,
        accepts=(False,),
        recipe_rank=52,
    )
    ssm_tail_midchunk: bool | Unset = tristate(
        "Take the tail snapshot inside the prefill pass.",
        default_note="on",
        available=False,
        accepts=(False,),
        recipe_rank=53,
    )
