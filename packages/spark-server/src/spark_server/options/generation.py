"""What is generated: templates, thinking, tools, sampling defaults."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from spark_server.options.spec import Unset, option, switch, tristate


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    title: ClassVar[str] = "Templates and thinking"

    chat_template: Path | Unset = option(
        "Jinja file to use as the chat template.",
        default_note="jinja-templates/, then the checkpoint's own",
        in_recipes=False,
    )
    disable_template_overrides: bool | Unset = switch("Do not look into jinja-templates/.")
    default_chat_template_kwargs: dict[str, Any] | Unset = option(
        "JSON object of template variables for requests that do not set them: enable_thinking, preserve_thinking, "
        "reasoning_effort.",
        metavar="JSON",
    )
    disable_thinking: bool | Unset = switch(
        "Never think, whatever a request says.", aliases=("--stupify",), recipe_rank=45
    )
    max_thinking_budget: int | Unset = option(
        "Tokens of thinking for requests that name no number; a request's effort makes it 1/4 to 4 times as many, which "
        "no request exceeds.",
        unit="tokens",
        default_note="MODEL.toml, then no limit",
        minimum=0,
        recipe_rank=30,
    )
    reasoning_parser: str | Unset = option(
        "Format in which the model thinks.", default_note="the model's", available=False, metavar="NAME"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    title: ClassVar[str] = "Tools and guards"

    tool_call_parser: (
        Literal["hermes", "qwen3_coder", "qwen3_xml", "gemma4", "mistral", "minimax_xml", "bare_json", "poolside_v1"]
        | Unset
    ) = option("Format in which the model calls tools.", default_note="the model's", available=False, recipe_rank=14)
    tool_max_tokens: int | Unset = option(
        "Most new tokens of a request with tools.",
        unit="tokens",
        default=8192,
        minimum=1,
        available=False,
        recipe_rank=15,
    )
    disable_tool_grammar: bool | Unset = tristate(
        "No grammar for tool calls that the model may choose; this build has none.",
        available=False,
        accepts=(True,),
        recipe_rank=16,
    )
    max_inter_tool_prose: int | Unset = option(
        "Tokens of prose between two tool calls; 0 is no limit.",
        unit="tokens",
        default_note="MODEL.toml, then 3072",
        minimum=0,
        available=False,
        accepts=(0,),
    )
    content_loop_watchdog: bool | Unset = tristate(
        "End an answer that repeats itself.", available=False, accepts=(False,)
    )
    content_loop_min_repeats: int | Unset = option(
        "Repeats that count as a loop.", default_note="3", minimum=2, available=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    title: ClassVar[str] = "Sampling defaults"

    max_output_tokens: int | Unset = option(
        "Most new tokens of one request; a request that names no limit gets this one.",
        unit="tokens",
        default_note="the context",
        minimum=1,
    )
    default_temperature: float | Unset = option(
        "For requests that set none; 0 is greedy.",
        default_note="MODEL.toml, generation_config.json, then 1",
        minimum=0.0,
        maximum=2.0,
    )
    default_top_p: float | Unset = option(
        "For requests that set none; 1 is off.",
        default_note="MODEL.toml, generation_config.json, then 1",
        above=0.0,
        maximum=1.0,
    )
    default_top_k: int | Unset = option(
        "For requests that set none; 0 is off.", default_note="MODEL.toml, generation_config.json, then 0", minimum=0
    )
    default_min_p: float | Unset = option(
        "For requests that set none; 0 is off.",
        default_note="MODEL.toml, generation_config.json, then 0",
        minimum=0.0,
        maximum=1.0,
    )
    default_top_n_sigma: float | Unset = option(
        "For requests that set none; 0 is off.", default_note="off", minimum=0.0, available=False, accepts=(0.0,)
    )
    adaptive_sampling: bool | Unset = switch("Sample only where the model is unsure; slower.", available=False)
