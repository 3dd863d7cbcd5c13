import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_model.recipes import Recipe
from spark_server.options.checks import find_problems
from spark_server.options.layers import built_in_defaults, merge, read_environment, read_flags, read_recipe
from spark_server.options.spec import UNSET
from spark_server.options.table import recipe_table
from spark_server.options.values import render_value


def recipe(defaults: Mapping[str, Any], name: str = "r") -> Recipe:
    return Recipe(name=name, path=Path("r.yaml"), model="m", defaults=defaults)


def test_recipe_keys_are_read_like_flags() -> None:
    layer = read_recipe(
        recipe(
            {"max_model_len": 4096, "host": "::1", "served_model_name": "n", "speculative": False, "dtype": "float32"}
        )
    )
    assert layer.problems == []
    assert layer.values == {
        "max_seq_len": 4096,
        "bind": "::1",
        "model_name": "n",
        "speculative": False,
        "dtype": "float32",
    }
    assert find_problems([layer]) == []


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({"max_modl_len": 1}, "recipe r: max_modl_len: unknown key; did you mean max_model_len?"),
        ({"max_seq_len": 1}, "recipe r: max_seq_len: unknown key; a recipe writes max_model_len"),
        (
            {"max_num_batched_tokens": 1, "max_prefill_tokens": 1},
            "recipe r: max_prefill_tokens: means the same as `max_num_batched_tokens`; keep one of them",
        ),
        ({"api_key": "a", "auth_token": "a"}, "recipe r: auth_token: means the same as `api_key`; keep one of them"),
        ({"port": "x"}, "recipe r: port x: expected a whole number"),
        ({"port": 1.5}, "recipe r: port 1.5: expected a whole number"),
        ({"speculative": "yes"}, "recipe r: speculative yes: expected true or false"),
        ({"rank": 0}, "recipe r: rank: a recipe may not set it; give --rank on the command line"),
        (
            {"model_from_path": "/x"},
            "recipe r: model_from_path: a recipe cannot set it; write the path as the recipe's",
        ),
        ({"kv_cache_dtype": "fp8"}, "recipe r: kv_cache_dtype fp8: not available in this build"),
        ({"speculative": True}, "recipe r: speculative true: not available in this build; leave it out"),
        ({"gpu_memory_utilization": 2}, "recipe r: gpu_memory_utilization 2: expected at most 1"),
    ],
)
def test_wrong_recipe_keys_are_refused(defaults: dict[str, Any], expected: str) -> None:
    found = find_problems([read_recipe(recipe(defaults))])
    assert any(line.startswith(expected) for line in found), found


def test_a_flag_wins_over_environment_and_recipe() -> None:
    layers = [
        read_flags({"port": "1"}),
        read_environment({"log_level": ("SPARK_LOG_LEVEL", "debug"), "no_tui": ("ATLAS_NO_TUI", "1")}),
        read_recipe(recipe({"port": 2, "max_batch_size": 4, "log_level": "error"})),
        built_in_defaults(),
    ]
    merged = merge(layers)
    assert (merged.options.server.port, merged.origin["port"]) == (1, "flag")
    assert (merged.options.server.log_level, merged.origin["log_level"]) == ("debug", "env")
    assert (merged.options.scheduling.max_batch_size, merged.origin["max_batch_size"]) == (4, "recipe")
    assert (merged.options.memory.block_size, merged.origin["block_size"]) == (16, "default")
    assert merged.options.server.no_tui is True
    assert merged.options.sampling.default_min_p is UNSET


def test_a_flag_rescues_what_the_recipe_has_and_the_build_lacks() -> None:
    from_recipe = read_recipe(recipe({"kv_cache_dtype": "fp8", "scheduling_policy": "slai"}))
    assert len(find_problems([from_recipe])) == 2
    layers = [read_flags({"kv_cache_dtype": "bf16", "dtype": "bfloat16", "scheduling_policy": "fifo"}), from_recipe]
    assert find_problems(layers) == []


@pytest.mark.parametrize("text", ["", "0"])
def test_an_empty_or_zero_variable_is_not_set(text: str) -> None:
    assert read_environment({"no_tui": ("ATLAS_NO_TUI", text)}).values == {}


def test_a_wrong_variable_is_named() -> None:
    layer = read_environment({"log_level": ("SPARK_LOG_LEVEL", "warn")})
    assert layer.problems == [
        "SPARK_LOG_LEVEL warn: expected one of debug, info, warning, error; did you mean warning?"
    ]


def recipe_files() -> dict[str, dict[str, Any]]:
    data = os.environ.get("SPARK_TEST_DATA")
    if not data:
        pytest.skip("SPARK_TEST_DATA is not set")
    found = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(Path(data, "recipes").rglob("*.yaml"))}
    return {name: content for name, content in found.items() if isinstance(content, dict) and "defaults" in content}


def test_every_key_of_the_published_recipes_is_known() -> None:
    files = recipe_files()
    assert len(files) >= 39
    for name, content in files.items():
        content["defaults"].pop("env", None)  # three published recipes have it in the wrong place
        layer = read_recipe(recipe(content["defaults"], name))
        assert layer.problems == [], name


def test_recipe_table_carries_the_order_of_a_rendered_command_line() -> None:
    files = recipe_files()
    with Path(os.environ["SPARK_TEST_DATA"], "recipes", "expected-serve-lines.tsv").open() as lines:
        rows = [row for row in csv.DictReader(lines, delimiter="\t") if row["placement"] == "solo"]
    compared = 0
    for row in rows:
        content = files[row["recipe"]]
        if not row["serve_line"].startswith("spark serve") or row["unmapped_defaults"]:
            continue
        words = ["spark", "serve", content["model"]]
        for key, option in recipe_table().items():
            value = content["defaults"].get(key)
            flag = "--host" if key == "host" else option.flag
            if option.spec.presence_only:
                words += [flag] if value else []
            elif value is not None:
                words += [flag, render_value(value)]
        assert " ".join(words) == row["serve_line"]
        compared += 1
    assert compared >= 30
