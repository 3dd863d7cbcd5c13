"""Imports go down only, and what must stay light imports nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["spark_kernels", "spark_runtime", "spark_model", "spark_server"]  # low to high


def imported_packages(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down_only(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    sources = sorted((ROOT / "packages" / layer.replace("_", "-") / "src" / layer).rglob("*.py"))
    assert sources
    upward = {str(file.relative_to(ROOT)): imported_packages(file) & above for file in sources}
    assert {file: names for file, names in upward.items() if names} == {}


HEAVY = ("torch", "cupy", "cutlass", "transformers")
LIGHT_MODULES = [
    "spark_kernels",
    "spark_kernels.errors",
    "spark_kernels.ggml.types",
    "spark_runtime.types",
    "spark_runtime.kvcache.blocks",
    "spark_model",
    "spark_model.recipes",
    "spark_model.reference",
    "spark_model.facts",
    "spark_model.gguf",
    "spark_model.tokenizer",
    "spark_model.chat_template",
    "spark_model.detokenizer",
    "spark_server.cli",
    "spark_server.resolve",
    "spark_server.engine.client",
    "spark_server.scheduler",
    "spark_server.http.app",
    "spark_server.http.server",
]


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


INITS = [
    path for path in ROOT.glob("packages/*/src/**/__init__.py") if path.parents[1].name != "spark_kernels"
]  # but ops


@pytest.mark.parametrize("path", sorted(INITS), ids=lambda path: path.parent.name)
def test_package_init_has_no_logic(path: Path) -> None:
    banned = (ast.For, ast.While, ast.With, ast.Try)
    found = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, banned)]
    assert found == []
