import json
import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from spark_kernels.errors import SparkError
from spark_model.checkpoint import Checkpoint, ModelFacts
from spark_model.errors import ModelNotFoundError
from spark_model.recipes import Recipe
from spark_server import cli, env
from spark_server.config import ServeConfig
from spark_server.errors import StartupError

HEAVY = ["torch", "structlog", "yaml", "tokenizers", "msgspec", "starlette", "hypercorn", "numpy", "huggingface_hub"]


class FakeParts:
    """Stands for name resolution, facts and the server; records what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.served: list[ServeConfig] = []
        self.recipe: Recipe | None = None
        self.error: SparkError | None = None
        self.server_error: SparkError | None = None

    def resolve_model(self, reference: str, **details: Any) -> Checkpoint:
        self.asked.append((reference, details))
        if self.error is not None:
            raise self.error
        return Checkpoint(reference, Path(reference).name, "gguf", Path("/models/SmolLM2-135M.gguf"), self.recipe)

    def read_facts(self, checkpoint: Checkpoint) -> ModelFacts:
        config = {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        }
        return ModelFacts("LlamaForCausalLM", config, 2048, 100, (2,), {"top_k": 40.0}, 1000)

    def run(self, config: ServeConfig) -> int:
        if self.server_error is not None:
            raise self.server_error
        self.served.append(config)
        return 0


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeParts]:
    fake = FakeParts()
    for name, member in (
        ("spark_model.reference", "resolve_model"),
        ("spark_model.facts", "read_facts"),
        ("spark_server.start", "run"),
    ):
        module = types.ModuleType(name)
        setattr(module, member, getattr(fake, member))
        monkeypatch.setitem(sys.modules, name, module)
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield fake
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_serve_hands_the_decided_config_to_the_server(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "smollm2", "--port", "0", "--max-seq-len", "1024") == 0
    (config,) = parts.served
    assert (config.http.port, config.http.max_model_len, config.http.served_model_names) == (0, 1024, ("smollm2",))
    assert parts.asked == [("smollm2", {"cache_dir": None, "allow_download": False, "recipe_dirs": ()})]
    assert (config.http.sampling.temperature, config.http.sampling.top_k) == (0.2, 40)
    captured = capsys.readouterr()
    assert captured.out == ""
    shown = {(line["name"], line["value"], line["origin"]) for line in map(json.loads, captured.err.splitlines())}
    assert shown == {
        ("port", "0", "flag"),
        ("max_seq_len", "1024", "flag"),
        ("default_temperature", "0.2", "model"),
        ("default_top_p", "0.9", "model"),
        ("default_top_k", "40", "checkpoint"),
    }


def test_serve_passes_where_to_look(parts: FakeParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_RECIPE_PATH", "/recipes")
    monkeypatch.setenv("SPARK_LOG_LEVEL", "error")
    assert run("serve", "org/name", "--cache-dir", "/cache", "--allow-download") == 0
    assert parts.asked == [
        ("org/name", {"cache_dir": Path("/cache"), "allow_download": True, "recipe_dirs": (Path("/recipes"),)})
    ]
    assert parts.served[0].log_level == "error"
    assert parts.served[0].origin["log_level"] == "env"


def test_serve_model_from_path_leaves_model_as_a_name(parts: FakeParts) -> None:
    assert run("serve", "my-name", "--model-from-path", "/models/x") == 0
    assert run("serve", "--model-from-path", "/models/x") == 0
    assert [reference for reference, _ in parts.asked] == ["/models/x", "/models/x"]
    assert [config.http.served_model_names for config in parts.served] == [("my-name",), ("x",)]


def test_serve_applies_the_recipe(parts: FakeParts) -> None:
    parts.recipe = Recipe("r", Path("r.yaml"), "m", {"port": 4321, "max_model_len": 512})
    assert run("serve", "r", "--port", "1") == 0
    assert (parts.served[0].http.port, parts.served[0].http.max_model_len) == (1, 512)


def test_serve_refuses_a_recipe_with_what_the_build_lacks(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.recipe = Recipe("r", Path("r.yaml"), "m", {"kv_cache_dtype": "fp8", "enable_prefix_caching": True})
    assert run("serve", "r", "--tp-size", "2") == 2
    assert parts.served == []
    assert capsys.readouterr().err.splitlines() == [
        "spark: 3 options cannot be used:",
        "  --tp-size 2: not available in this build; this build takes 1",
        "  recipe r: kv_cache_dtype fp8: not available in this build; this build takes bf16",
        "  recipe r: enable_prefix_caching true: not available in this build; leave it out",
    ]


def test_serve_without_a_model_is_a_usage_error(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve") == 2
    assert "MODEL is missing: give a recipe name" in capsys.readouterr().err
    assert run("serve", "--port", "x") == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  --port x: expected a whole number", "  MODEL is missing"]


def test_serve_reports_a_missing_model_in_one_line(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.error = ModelNotFoundError("no recipe, folder or cached model named nope")
    assert run("serve", "nope") == 1
    assert capsys.readouterr().err == "spark: no recipe, folder or cached model named nope\n"


def test_serve_reports_wrong_options_and_a_missing_model_together(
    parts: FakeParts, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.error = ModelNotFoundError("there is no nope")
    assert run("serve", "nope", "--port", "x", "--chat-template", "/no/file", "--allow-download") == 2
    assert capsys.readouterr().err.splitlines() == [
        "spark: 3 options cannot be used:",
        "  --port x: expected a whole number",
        "  --chat-template /no/file: there is no such file",
        "  there is no nope",
    ]
    assert parts.asked[0][1]["allow_download"] is False  # nothing is fetched for a server that will not start


def test_serve_reports_a_missing_template_when_the_model_is_there(
    parts: FakeParts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "m", "--chat-template", "/no/file") == 2
    assert capsys.readouterr().err == "spark: --chat-template /no/file: there is no such file\n"


def test_serve_reports_that_the_server_cannot_start(parts: FakeParts, capsys: pytest.CaptureFixture[str]) -> None:
    parts.server_error = StartupError("port 8888 is in use; give another with --port")
    assert run("serve", "m", "--log-level", "error") == 1
    assert capsys.readouterr().err == "spark: port 8888 is in use; give another with --port\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "m", "--max-seq-lenn", "1"], "--max-seq-len"),
        (["serv"], "serve"),
        (["serve", "a", "b"], "unexpected extra argument"),
        (["serve", "a", "--port"], "requires an argument"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert expected in capsys.readouterr().err


def test_dump_serve_options_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dump-serve-options") == 0
    assert {entry["flag"] for entry in json.loads(capsys.readouterr().out)["options"]} > {"--port", "--bind"}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom spark_server.cli import main\ntry: main(sys.argv[1].split())\n"
        "except SystemExit as end: code = end.code\n"
        "print('LOADED', code, [name for name in sys.modules if name in sys.argv[2:]])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, " ".join(arguments), *HEAVY],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert shown.stdout.splitlines()[-1] == "LOADED 0 []"


def test_a_wrong_option_is_found_without_heavy_imports() -> None:
    program = (
        "import sys\nfrom spark_server.cli import main\ntry: main(['serve', '--port', 'x'])\n"
        "except SystemExit as end: code = end.code\n"
        "print('LOADED', code, [name for name in sys.modules if name in sys.argv[1:]])"
    )
    heavy = [name for name in HEAVY if name != "yaml"]  # the recipe reader needs it
    shown = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "LOADED 2 []"
