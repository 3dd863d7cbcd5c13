import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.model_toml import ModelToml
from spark_model.recipes import Recipe
from spark_server.errors import ConfigError, StartupError
from spark_server.machine import Machine
from spark_server.options.layers import Layer, read_environment, read_flags, read_recipe
from spark_server.resolve import CPU_KV_CACHE_BYTES, Resolved, Setting, resolve

GIB = 1 << 30
# SmolLM2-135M: 30 layers of 3 KV heads of 64
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
FP32_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4


def decide(
    flags: Mapping[str, object] | None = None,
    *,
    recipe: Mapping[str, Any] | None = None,
    recipe_env: Mapping[str, str] | None = None,
    recipe_fields: Mapping[str, Any] | None = None,
    environment: Mapping[str, tuple[str, str]] | None = None,
    generation: Mapping[str, float] | None = None,
    preset: Mapping[str, float] | None = None,
    context_length: int = 8192,
    kind: Literal["gguf", "safetensors"] = "gguf",
    memory: int = 16 * GIB,
    config: Mapping[str, Any] = CONFIG,
) -> Resolved:
    checkpoint = Checkpoint(reference="tiny", name="tiny", kind=kind, path=Path("/models/tiny.gguf"))
    layers: list[Layer] = [read_flags(flags or {}), read_environment(environment or {})]
    if recipe is not None:
        named = Recipe("tiny", Path("tiny.yaml"), "m", defaults=recipe, env=recipe_env or {}, **recipe_fields or {})
        checkpoint = dataclasses.replace(checkpoint, recipe=named)
        layers.append(read_recipe(named))
    return resolve(
        layers,
        model_name=checkpoint.name,
        checkpoint=checkpoint,
        facts=ModelFacts(
            architecture="LlamaForCausalLM",
            config=config,
            context_length=context_length,
            vocab_size=100,
            eos_token_ids=(2,),
            generation=generation or {},
            weight_bytes=93_000_000,
        ),
        model_toml=None
        if preset is None
        else ModelToml(Path("MODEL.toml"), "tiny", "", (), model_types=(), sampling=preset),
        machine=Machine(available_memory_bytes=memory, num_cpus=2),
    )


def test_resolve_fills_everything_from_defaults() -> None:
    resolved = decide(context_length=40960)
    http, engine = resolved.config.http, resolved.config.engine
    assert (http.host, http.port, http.served_model_names) == ("127.0.0.1", 8888, ("tiny",))
    assert (http.request_timeout_s, http.shutdown_timeout_s, http.max_body_bytes) == (300.0, 15.0, 32 << 20)
    assert (http.max_model_len, http.max_output_tokens) == (32768, 32768)
    assert (http.chat_template, http.use_template_overrides, http.chat_template_kwargs) == (None, True, {})
    assert (engine.device, engine.dtype, engine.load_format) == ("cpu", "auto", "auto")
    assert (engine.block_size, engine.num_threads) == (16, 2)
    assert dataclasses.asdict(engine.scheduler) == {
        "policy": "fifo",
        "max_batch_size": 8,
        "max_num_seqs": 128,
        "max_prefill_tokens": 512,
        "max_model_len": 32768,
    }
    assert resolved.config.log_level == "info"
    assert resolved.settings == ()
    assert resolved.warnings == ()


def test_resolve_takes_every_working_flag() -> None:
    resolved = decide(
        {
            "port": "1234",
            "bind": "::1",
            "model_name": "a, b,a",
            "dtype": "bfloat16",
            "max_seq_len": "1000",
            "max_output_tokens": "100",
            "max_batch_size": "2",
            "max_num_seqs": "3",
            "block_size": "32",
            "max_prefill_tokens": "0",
            "request_timeout": "0",
            "shutdown_timeout": "1",
            "max_queue_depth": "5",
            "num_threads": "1",
            "chat_template": "t.jinja",
            "disable_template_overrides": True,
            "default_chat_template_kwargs": '{"reasoning_effort": "low"}',
            "load_format": "gguf",
            "log_level": "debug",
        }
    )
    http, engine = resolved.config.http, resolved.config.engine
    assert (http.host, http.port, http.served_model_names) == ("::1", 1234, ("a", "b"))
    assert (http.max_model_len, http.max_output_tokens, http.max_queue_depth) == (1000, 100, 5)
    assert (http.request_timeout_s, http.shutdown_timeout_s) == (0.0, 1.0)
    assert (http.chat_template, http.use_template_overrides) == (Path("t.jinja"), False)
    assert http.chat_template_kwargs == {"reasoning_effort": "low"}
    assert (engine.dtype, engine.block_size, engine.num_threads, engine.load_format) == ("bfloat16", 32, 1, "gguf")
    assert (engine.scheduler.max_batch_size, engine.scheduler.max_num_seqs) == (2, 3)
    assert (engine.scheduler.max_prefill_tokens, engine.scheduler.max_model_len) == (0, 1000)
    assert resolved.config.log_level == "debug"
    assert set(resolved.config.origin.values()) == {"flag", "default"}


def test_context_is_the_smaller_of_flag_and_checkpoint() -> None:
    flag = decide({"max_seq_len": "100"}, context_length=200).config
    assert (flag.http.max_model_len, flag.origin["max_seq_len"]) == (100, "flag")
    checkpoint = decide({"max_seq_len": "300", "max_output_tokens": "250"}, context_length=200)
    assert checkpoint.config.http.max_model_len == 200
    assert checkpoint.config.http.max_output_tokens == 200
    assert checkpoint.config.engine.scheduler.max_model_len == 200
    assert Setting("max_seq_len", "200", "checkpoint") in checkpoint.settings


def test_sampling_defaults_go_down_the_chain() -> None:
    neutral = decide().config.http.sampling
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.min_p) == (1.0, 1.0, 0, 0.0)
    assert set(neutral.origin.values()) == {"default"}
    mixed = decide(
        {"default_temperature": "0"},
        recipe={"default_top_k": 9},
        preset={"temperature": 0.2, "top_p": 0.9, "top_k": 8},
        generation={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
    )
    sampling = mixed.config.http.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.9, 9, 0.1)
    assert sampling.origin == {"temperature": "flag", "top_p": "model", "top_k": "recipe", "min_p": "checkpoint"}
    assert set(mixed.settings) == {
        Setting("max_seq_len", "8192", "checkpoint"),
        Setting("default_temperature", "0", "flag"),
        Setting("default_top_k", "9", "recipe"),
        Setting("default_top_p", "0.9", "model"),
        Setting("default_min_p", "0.1", "checkpoint"),
    }


def test_origins_are_kept() -> None:
    resolved = decide(
        {"port": "1"},
        environment={"log_level": ("SPARK_LOG_LEVEL", "error")},
        recipe={"port": 2, "max_model_len": 512, "served_model_name": "recipe-name"},
    )
    assert resolved.settings == (
        Setting("model_name", "recipe-name", "recipe"),
        Setting("port", "1", "flag"),
        Setting("log_level", "error", "env"),
        Setting("max_seq_len", "512", "recipe"),
    )
    assert resolved.config.http.served_model_names == ("recipe-name",)


def test_disable_thinking_sets_the_template_variable() -> None:
    http = decide({"disable_thinking": True, "default_chat_template_kwargs": '{"preserve_thinking": true}'}).config.http
    assert http.disable_thinking
    assert http.chat_template_kwargs == {"preserve_thinking": True, "enable_thinking": False}


def test_kv_pool_is_small_on_the_cpu_but_holds_one_context() -> None:
    one_context = 8192 * FP32_BYTES_PER_TOKEN
    assert one_context > CPU_KV_CACHE_BYTES
    assert decide().config.engine.kv_cache_bytes == one_context
    assert decide({"max_seq_len": "4096"}).config.engine.kv_cache_bytes == CPU_KV_CACHE_BYTES
    assert decide({"max_seq_len": "100"}).config.engine.kv_cache_bytes == 8 * 112 * FP32_BYTES_PER_TOKEN
    assert (
        decide({"dtype": "bfloat16", "max_seq_len": "16"}).config.engine.kv_cache_bytes == 8 * 8 * FP32_BYTES_PER_TOKEN
    )


def test_kv_pool_follows_the_memory_bound_when_it_is_given() -> None:
    engine = decide({"gpu_memory_utilization": "0.5"}).config.engine
    assert engine.memory_bound_bytes == 8 * GIB
    assert engine.kv_cache_bytes == 8 * 8192 * FP32_BYTES_PER_TOKEN
    tight = decide({"gpu_memory_utilization": "0.5"}, memory=2 * GIB).config.engine
    assert tight.kv_cache_bytes == GIB - 93_000_000


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(StartupError) as caught:
        decide(memory=GIB // 4)
    message = str(caught.value)
    assert message.startswith("--max-seq-len 8192: needs 0.35 GiB of KV cache beside 0.09 GiB of weights")
    fitting = message.removesuffix(" or less").rsplit(" ", 1)[-1]
    assert decide({"max_seq_len": fitting}, memory=GIB // 4).config.http.max_model_len == int(fitting)
    with pytest.raises(StartupError, match="a smaller model is needed"):
        decide(memory=1 << 20)


def test_kv_pool_uses_head_dim_and_ungrouped_heads() -> None:
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert decide({"max_seq_len": "16", "max_batch_size": "1"}, config=plain).config.engine.kv_cache_bytes == (
        16 * 2 * 2 * 4 * 16 * 4
    )
    with_dim = {**plain, "head_dim": 32, "num_key_value_heads": 1}
    assert decide({"max_seq_len": "16", "max_batch_size": "1"}, config=with_dim).config.engine.kv_cache_bytes == (
        16 * 2 * 2 * 1 * 32 * 4
    )


@pytest.mark.parametrize("config", [{}, {"text_config": {}}, {**CONFIG, "num_attention_heads": 0}])
def test_a_configuration_without_sizes_is_left_to_the_engine(config: dict[str, Any]) -> None:
    assert decide(config=config).config.engine.kv_cache_bytes == 0
    with pytest.raises(StartupError, match="a smaller model is needed"):
        decide(config=config, memory=1 << 20)


def test_load_format_has_to_fit_the_checkpoint() -> None:
    assert decide({"load_format": "safetensors"}, kind="safetensors").config.engine.load_format == "safetensors"
    with pytest.raises(ConfigError, match="--load-format safetensors: tiny.gguf is gguf; drop the option"):
        decide({"load_format": "safetensors"})


def test_recipe_that_wants_more_than_this_build_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        decide(recipe={}, recipe_fields={"min_nodes": 2, "command": "spark serve {model}"})
    assert str(caught.value) == (
        "2 options cannot be used:\n"
        "  recipe tiny: needs 2 ranks; not available in this build, which runs one\n"
        "  recipe tiny: `command` templates are not available in this build; use `defaults`"
    )


def test_all_violations_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        decide(
            {"port": "x", "tp_size": "2", "load_format": "safetensors"},
            recipe={"kv_cache_dtype": "fp8", "max_modl_len": 1},
        )
    assert str(caught.value) == (
        "5 options cannot be used:\n"
        "  --port x: expected a whole number\n"
        "  recipe tiny: max_modl_len: unknown key; did you mean max_model_len?\n"
        "  --tp-size 2: not available in this build; this build takes 1\n"
        "  recipe tiny: kv_cache_dtype fp8: not available in this build; this build takes bf16\n"
        "  --load-format safetensors: tiny.gguf is gguf; drop the option"
    )


def test_warnings_tell_the_operator() -> None:
    open_to_all = decide({"bind": "0.0.0.0"}, recipe={}, recipe_env={"NCCL_DEBUG": "INFO"})
    assert len(open_to_all.warnings) == 2
    assert "--bind 127.0.0.1" in open_to_all.warnings[0]
    assert "NCCL_DEBUG" in open_to_all.warnings[1]
