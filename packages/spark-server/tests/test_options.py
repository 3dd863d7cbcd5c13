import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from spark_server.options.checks import find_problems
from spark_server.options.command import ServeCommand, click_parameters, flag_help, option_help
from spark_server.options.document import markdown_page, surface
from spark_server.options.layers import Layer, read_flags
from spark_server.options.table import option_table
from spark_server.options.values import parse_value, render_value

# Every flag of the reference system's surface, as its users write them.
REFERENCE_OPTIONS = [
    "model_from_path",
    "model_name",
    "kernel_target",
    "cache_dir",
    "gpu_ordinal",
    "check_kernels",
    "dangerously_allow_unresolved_kernel_lookups",
    "auto_swap",
    "no_auto_swap",
    "port",
    "bind",
    "require_auth",
    "auth_tokens_file",
    "auth_token",
    "request_timeout",
    "dump",
    "profile",
    "no_tui",
    "max_seq_len",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_high_precision_layers",
    "fp8_kv_calibration_tokens",
    "fp8_kv_headroom",
    "oom_guard_mb",
    "swap_space_gb",
    "high_speed_swap",
    "high_speed_swap_dir",
    "high_speed_swap_gb",
    "high_speed_swap_resident_blocks",
    "high_speed_swap_rank",
    "high_speed_swap_qd",
    "high_speed_swap_graph",
    "high_speed_swap_cache_blocks_per_seq",
    "no_fast_load",
    "fast_load_prefetch_shards",
    "ssm_cache_slots",
    "ssm_checkpoint_interval",
    "ssm_h_dtype",
    "ssm_rollback_mode",
    "gdn_fused_norm",
    "ssm_batched_recurrent",
    "ssm_tail_midchunk",
    "exact_verify",
    "prefill_varlen_batch",
    "max_batch_size",
    "max_num_seqs",
    "max_prefill_tokens",
    "scheduling_policy",
    "tbt_deadline_ms",
    "enable_prefix_caching",
    "warmup_prompt",
    "speculative",
    "self_speculative",
    "ngram_speculative",
    "dflash",
    "draft_model",
    "dflash_gamma",
    "dflash_window_size",
    "num_drafts",
    "mtp_quantization",
    "mtp_vocab",
    "mtp_gate",
    "lm_head_dtype",
    "rank",
    "world_size",
    "tp_size",
    "ep_size",
    "master_addr",
    "master_port",
    "tool_call_parser",
    "tool_max_tokens",
    "disable_tool_grammar",
    "disable_thinking",
    "max_thinking_budget",
    "max_inter_tool_prose",
    "content_loop_watchdog",
    "content_loop_min_repeats",
    "default_chat_template_kwargs",
    "disable_template_overrides",
    "auto_compact",
    "default_top_n_sigma",
    "default_min_p",
    "adaptive_sampling",
    "vision_max_pixels",
    "vision_allow_remote_images",
    "vision_remote_image_max_mb",
    "vision_remote_image_timeout_s",
    "vision_remote_image_allow_private",
    "video_allow_ffmpeg",
    "video_ffmpeg_path",
    "video_fps",
    "video_max_frames",
    "video_decode_timeout_s",
    "lora_adapter",
    "max_lora_rank",
    "max_loras",
    "lora_stageable",
    "lora_stageable_disk",
    "src_lang",
    "tgt_lang",
    "expert_telemetry",
    "expert_category",
    "reasoning_parser",
]
PRESENCE_ONLY = [
    "enable_prefix_caching",
    "speculative",
    "self_speculative",
    "ngram_speculative",
    "dflash",
    "disable_thinking",
    "high_speed_swap",
    "require_auth",
    "video_allow_ffmpeg",
    "auto_swap",
    "no_auto_swap",
    "check_kernels",
    "dangerously_allow_unresolved_kernel_lookups",
    "disable_template_overrides",
    "profile",
    "adaptive_sampling",
    "no_fast_load",
    "no_tui",
    "fast_load_prefetch_shards",
    "vision_allow_remote_images",
    "vision_remote_image_allow_private",
]
TRISTATE = [
    "disable_tool_grammar",
    "gdn_fused_norm",
    "ssm_batched_recurrent",
    "ssm_tail_midchunk",
    "prefill_varlen_batch",
    "exact_verify",
    "content_loop_watchdog",
    "high_speed_swap_graph",
]


def parse(*arguments: str) -> dict[str, Any]:
    """What click gives for a command line, without what was not given."""
    command = ServeCommand("serve", params=[click.Argument(["model"], required=False), *click_parameters()])
    given = command.make_context("serve", list(arguments)).params
    return {name: value for name, value in given.items() if value is not None and value != ()}


def flags(*arguments: str) -> Layer:
    return read_flags({name: value for name, value in parse(*arguments).items() if name != "model"})


def problems(*arguments: str) -> list[str]:
    return find_problems([flags(*arguments)])


def test_table_has_the_whole_reference_surface() -> None:
    assert [name for name in REFERENCE_OPTIONS if name not in option_table()] == []


def test_table_knows_which_booleans_take_a_value() -> None:
    for name in PRESENCE_ONLY:
        assert option_table()[name].spec.presence_only, name
    for name in TRISTATE:
        option = option_table()[name]
        assert (option.type, option.spec.presence_only) == ("bool", False), name


def test_table_flags_and_recipe_keys_are_unique() -> None:
    spellings = [flag for option in option_table().values() for flag in option.flags]
    assert len(spellings) == len(set(spellings))
    keys = [key for option in option_table().values() for key in option.recipe_keys]
    assert len(keys) == len(set(keys))
    ranks = sorted(option.spec.recipe_rank for option in option_table().values() if option.spec.recipe_rank)
    assert ranks == [rank for rank in range(1, 58) if rank != 7]  # 7 is the alias max_num_batched_tokens


@pytest.mark.parametrize("name", list(option_table()))
def test_defaults_and_accepted_values_parse_to_themselves(name: str) -> None:
    option = option_table()[name]
    for value in [*option.spec.accepts, *([] if option.spec.default is None else [option.spec.default])]:
        assert parse_value(option, render_value(value)) == value
    if option.spec.default is not None:
        assert not option.spec.presence_only
    assert option.spec.help.endswith(".")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m", "--port", "1"], {"model": "m", "port": "1"}),
        (["--host", "0.0.0.0"], {"bind": "0.0.0.0"}),
        (["--served-model-name", "n"], {"model_name": "n"}),
        (["--stupify"], {"disable_thinking": True}),
        (["--speculative", "m"], {"speculative": True, "model": "m"}),
        (["--disable-tool-grammar", "false"], {"disable_tool_grammar": "false"}),
        (["--enable-prefix-caching"], {"enable_prefix_caching": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--auto-compact", "m"], {"auto_compact": "0.75", "model": "m"}),
        (["--auto-compact=0.5", "m"], {"auto_compact": "0.5", "model": "m"}),
        (["--dump", "f.jsonl", "m"], {"dump": "f.jsonl", "model": "m"}),
        (["m", "--dump"], {"dump": "spark-dump.jsonl", "model": "m"}),
        (["m", "--dump", "--port", "1"], {"dump": "spark-dump.jsonl", "model": "m", "port": "1"}),
        (["--lora-adapter", "a=b", "--lora-adapter", "c=d"], {"lora_adapter": ("a=b", "c=d")}),
        ([], {}),
    ],
)
def test_command_line_forms(arguments: list[str], expected: dict[str, object]) -> None:
    assert parse(*arguments) == expected


def test_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(click.NoSuchOption) as caught:
        parse("--max-seq-lenn", "1")
    assert "--max-seq-len" in caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "65536"], ["--port 65536: expected at most 65535"]),
        (["--port", "x"], ["--port x: expected a whole number"]),
        (["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization 0: expected more than 0"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization 1.5: expected at most 1"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization nan: expected a finite number"]),
        (["--max-seq-len", "0"], ["--max-seq-len 0: expected at least 1 tokens"]),
        (
            ["--dtype", "bfloat"],
            ["--dtype bfloat: expected one of auto, float32, bfloat16, float16; did you mean bfloat16?"],
        ),
        (["--model-name", ""], ["--model-name '': expected a value, got nothing"]),
        (["--default-chat-template-kwargs", "[]"], None),
        (["--default-chat-template-kwargs", "{"], None),
        (
            ["--default-chat-template-kwargs", '{"enable_thinkin": true}'],
            ["--default-chat-template-kwargs: unknown key 'enable_thinkin'; did you mean enable_thinking?"],
        ),
        (["--default-chat-template-kwargs", '{"reasoning_effort": "hgih"}'], None),
        (["--default-chat-template-kwargs", '{"thinking_budget": -5}'], None),
        (["--default-chat-template-kwargs", '{"enable_thinking": 1}'], None),
    ],
)
def test_wrong_values_are_refused(arguments: list[str], expected: list[str] | None) -> None:
    found = problems(*arguments)
    assert found == expected if expected is not None else len(found) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: not available in this build; this build takes bf16"),
        (["--tp-size", "2"], "--tp-size 2: not available in this build; this build takes 1"),
        (["--device", "cuda"], "--device cuda: not available in this build; this build takes auto or cpu"),
        (
            ["--scheduling-policy", "slai"],
            "--scheduling-policy slai: not available in this build; this build takes fifo",
        ),
        (["--enable-prefix-caching"], "--enable-prefix-caching: not available in this build; leave it out"),
        (["--auth-token", "secret"], "--auth-token: not available in this build; leave it out"),
    ],
)
def test_what_the_build_lacks_is_refused_by_name(arguments: list[str], expected: str) -> None:
    assert problems(*arguments) == [expected]


@pytest.mark.parametrize(
    "name",
    [name for name, option in option_table().items() if not option.spec.available and not option.spec.accepts],
)
def test_every_unavailable_option_is_refused(name: str) -> None:
    option = option_table()[name]
    samples = {"bool": "true", "int": "3", "float": "1", "json": "{}", "choice": next(iter(option.choices), "")}
    arguments = [option.flag] if option.spec.presence_only else [f"{option.flag}={samples.get(option.type, 'x')}"]
    assert any(
        found.startswith(option.flag) and "not available in this build" in found for found in problems(*arguments)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp-size", "1", "--world-size", "1", "--rank", "0", "--ep-size", "1"],
        ["--device", "cpu"],
        ["--scheduling-policy", "fifo"],
        ["--no-enable-prefix-caching", "--no-fast-load", "--no-auto-swap", "--no-tui"],
        ["--disable-tool-grammar", "true", "--gdn-fused-norm", "false"],
        ["--kv-cache-dtype", "bf16", "--dtype", "bfloat16"],
        ["--ssm-cache-slots", "0", "--swap-space-gb", "0", "--default-top-n-sigma", "0"],
        ["--default-chat-template-kwargs", '{"enable_thinking": false, "reasoning_effort": "low"}'],
    ],
)
def test_what_changes_nothing_is_accepted(arguments: list[str]) -> None:
    assert problems(*arguments) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--speculative", "--dflash"], "--speculative and --dflash: only one way to draft can run; keep one of them"),
        (["--auto-swap", "--no-auto-swap"], "--auto-swap and --no-auto-swap: they contradict each other"),
        (["--auth-token", "t", "--auth-tokens-file", "f"], "tokens come from one place"),
        (["--require-auth"], "--require-auth: there is no token"),
        (["--tbt-deadline-ms", "50"], "only slai has a deadline"),
        (["--high-speed-swap"], "needs a folder"),
        (["--high-speed-swap-qd", "4"], "has no effect without --high-speed-swap"),
        (["--num-drafts", "3"], "nothing drafts"),
        (["--num-drafts", "3", "--dflash"], "the length of a dflash block"),
        (["--kv-cache-dtype", "bf16"], "add --dtype bfloat16"),
        (["--fp8-kv-calibration-tokens", "8", "--kv-cache-dtype", "nvfp4"], "nothing to calibrate"),
        (["--ssm-h-dtype", "f16"], "needs the fused norm"),
        (["--ssm-h-dtype", "f16", "--exact-verify", "true"], "cannot be verified exactly"),
        (["--ssm-h-dtype", "f16", "--dflash"], "does not go with --dflash"),
        (["--ssm-h-dtype", "f16-pool", "--speculative"], "does not go with --speculative"),
        (["--rank", "2", "--world-size", "2"], "ranks go from 0 to 1"),
        (["--tp-size", "4", "--world-size", "2"], "there are only 2 ranks"),
        (["--ep-size", "2", "--expert-category", "code"], "--expert-category code: does not go with --ep-size 2"),
        (["--stupify", "--max-thinking-budget", "9"], "there is no thinking with --disable-thinking"),
        (["--stupify", "--default-chat-template-kwargs", '{"enable_thinking":true}'], "enable_thinking contradicts"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], expected: str) -> None:
    assert any(expected in found for found in problems(*arguments))


def test_all_violations_are_found_together() -> None:
    found = problems("--port", "x", "--tp-size", "2", "--dtype", "b", "--speculative", "--dflash")
    assert [line.split(":")[0] for line in found] == [
        "--port x",
        "--dtype b",
        "--tp-size 2",
        "--speculative",
        "--dflash",
        "--speculative and --dflash",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(0.90, "0.9"), (2.0, "2"), (True, "true"), (16, "16"), ({"a": 1}, '{"a":1}')]
)
def test_render_value_is_short(value: Any, text: str) -> None:
    assert render_value(value) == text


def test_help_names_groups_defaults_and_what_is_missing() -> None:
    table = option_table()
    assert flag_help(table["auto_compact"]) == "--auto-compact[=X]"
    assert flag_help(table["dump"]) == "--dump [PATH]"
    assert flag_help(table["enable_prefix_caching"]) == "--[no-]enable-prefix-caching"
    assert flag_help(table["kv_cache_dtype"]) == "--kv-cache-dtype NAME"
    assert "[default: 8888]" in option_help(table["port"])
    assert option_help(table["speculative"]).endswith("[not available in this build]")
    assert option_help(table["scheduling_policy"]).endswith("[this build takes only fifo]")
    command = ServeCommand("serve", params=click_parameters())
    text = command.get_help(click.Context(command, info_name="serve"))
    for option in table.values():
        assert f"{option.title}:\n" in text
        assert option.flag.removeprefix("--") in text


def test_surface_is_complete_and_plain() -> None:
    described = {entry["name"]: entry for entry in surface()["options"]}
    assert described.keys() == option_table().keys()
    assert described["max_seq_len"]["recipe_keys"] == ["max_model_len"]
    assert described["video_ffmpeg_path"]["default"] == "ffmpeg"


def test_options_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "options.md"
    assert page.read_text() == markdown_page(), "run: spark dump-serve-options --format markdown > docs/options.md"


def test_options_import_nothing_heavy() -> None:
    program = "import sys, spark_server.options.document; print([m for m in sys.modules if m in sys.argv])"
    heavy = ["torch", "structlog", "yaml", "tokenizers", "msgspec", "starlette", "hypercorn", "numpy"]
    shown = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
