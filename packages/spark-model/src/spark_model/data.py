"""Where the data that ships with spark lies: the wheel's copy, else the repository that this file is part of."""

from pathlib import Path
from typing import Literal

DataFolder = Literal["recipes", "models", "jinja-templates"]


def data_folder(name: DataFolder) -> Path:
    """The folder of recipes, MODEL.toml files or template overrides. Raises FileNotFoundError if it is nowhere."""
    package = Path(__file__).resolve().parent
    installed = package / "data" / name
    if installed.is_dir():
        return installed
    # packages/spark-model/src/spark_model/ → the root of the repository (editable installs have no copy)
    repository = package.parents[3] / name
    if repository.is_dir():
        return repository
    raise FileNotFoundError(
        f"no folder {name!r} in {installed.parent} nor in {repository.parent}; reinstall spark-model"
    )
