"""Speculative decoding."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_server.options.spec import Unset, option, switch, tristate


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    title: ClassVar[str] = "Speculative decoding"

    speculative: bool | Unset = switch(
        "Draft with the checkpoint's multi-token prediction head.", available=False, recipe_rank=41
    )
    self_speculative: bool | Unset = switch("Draft by skipping recurrent layers.", available=False, recipe_rank=42)
    ngram_speculative: bool | Unset = switch("Draft from the text's own n-grams.", available=False, recipe_rank=43)
    dflash: bool | Unset = switch("Draft whole blocks with a drafter model.", available=False, recipe_rank=44)
    draft_model: str | Unset = option(
        "The drafter of --dflash.", default_note="MODEL.toml", available=False, recipe_rank=27, metavar="MODEL"
    )
    dflash_gamma: int | Unset = option(
        "Tokens in a drafted block.",
        unit="tokens",
        default_note="the drafter's block size, then 16",
        minimum=1,
        available=False,
        recipe_rank=28,
    )
    dflash_window_size: int | Unset = option(
        "Context of the drafter; 0 is all.", unit="tokens", default=4096, minimum=0, available=False, recipe_rank=29
    )
    num_drafts: int | Unset = option(
        "Drafted tokens in a step.",
        unit="tokens",
        default_note="MODEL.toml, then 1",
        minimum=1,
        available=False,
        recipe_rank=26,
    )
    mtp_quantization: Literal["bf16", "fp8", "nvfp4"] | Unset = option(
        "Type of the prediction head.", default="bf16", available=False, recipe_rank=24
    )
    mtp_vocab: int | Unset = option(
        "Token ids that the prediction head may draft, from 0; 0 is all.",
        unit="tokens",
        default=100000,
        minimum=0,
        available=False,
        recipe_rank=25,
    )
    mtp_gate: Literal["auto", "force"] | Unset = option(
        "Stop drafting while it does not pay, or never stop.", default_note="auto", available=False, recipe_rank=54
    )
    exact_verify: bool | Unset = tristate(
        "Check drafts one by one in recurrent layers.", default_note="off", available=False, accepts=(False,)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    title: ClassVar[str] = "More than one GPU"

    rank: int | Unset = option(
        "This process's rank.", default=0, minimum=0, available=False, accepts=(0,), in_recipes=False
    )
    world_size: int | Unset = option(
        "Number of ranks.", default=1, minimum=1, available=False, accepts=(1,), in_recipes=False
    )
    tp_size: int | Unset = option(
        "Ranks that share each layer.",
        default=1,
        minimum=1,
        available=False,
        accepts=(1,),
        recipe_key="tensor_parallel",
        recipe_rank=3,
    )
    ep_size: int | Unset = option(
        "Ranks that share the experts.", default=1, minimum=1, available=False, accepts=(1,), recipe_rank=10
    )
    master_addr: str | Unset = option(
        "Address of rank 0.",
        default="127.0.0.1",
        available=False,
        accepts=("127.0.0.1",),
        in_recipes=False,
        metavar="ADDRESS",
    )
    master_port: int | Unset = option(
        "Port of rank 0.",
        default=29500,
        minimum=1,
        maximum=65535,
        available=False,
        accepts=(29500,),
        in_recipes=False,
    )
