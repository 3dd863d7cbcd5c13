"""MODEL.toml: what is known about a model family and stands in no checkpoint. No torch.

One folder a family in models/. A file names the configurations that it is for (`[[model_types]]`) and, where other
models share such a configuration, parts of names of which a checkpoint has to carry one (`match_names`).
Unknown tables and keys are errors.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_model.checkpoint import ModelFacts
from spark_model.data import data_folder
from spark_model.errors import RecipeError

_TABLES = ("model", "model_types", "behavior", "sampling")
_MODEL_KEYS = ("name", "hf_id", "match_names")
_MODEL_TYPE_KEYS = ("model_type", "hidden_size")
_BEHAVIOR_KEYS = ("thinking_default", "max_thinking_budget")
_PRESETS = ("non_thinking",)
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class ModelType:
    """A configuration; hidden_size None is any."""

    model_type: str
    hidden_size: int | None


@dataclass(frozen=True, slots=True)
class ModelToml:
    """One MODEL.toml file.

    hf_id        the checkpoint that the file was written for; documentation
    match_names  parts of names, in lower case; a checkpoint has to carry one of them, unless there are none
    sampling     defaults for requests without thinking: some of temperature, top_p, top_k, min_p
    thinking_default     whether to think where nobody says; None = as the template does
    max_thinking_budget  as the option of this name; None = no limit
    """

    path: Path
    name: str
    hf_id: str
    match_names: tuple[str, ...]
    model_types: tuple[ModelType, ...]
    sampling: Mapping[str, float]
    thinking_default: bool | None = None
    max_thinking_budget: int | None = None

    def specificity(self, facts: ModelFacts, names: Iterable[str]) -> int:
        """How well the file fits a checkpoint: 0 not at all, 1 by model type, 2 by model type and hidden size."""
        carried = [name.lower() for name in names]
        if self.match_names and not any(part in name for part in self.match_names for name in carried):
            return 0
        fits = [0]
        for wanted in self.model_types:
            if wanted.model_type == facts.config.get("model_type"):
                if wanted.hidden_size is None:
                    fits.append(1)
                elif wanted.hidden_size == facts.config.get("hidden_size"):
                    fits.append(2)
        return max(fits)


def find_model_toml(facts: ModelFacts, names: Sequence[str], folder: Path | None = None) -> ModelToml | None:
    """The family's file, or None. `names` are what the checkpoint is called: reference, API name, file name.

    Raises RecipeError when a file is wrong, or when two fit equally well.
    """
    best: list[ModelToml] = []
    best_fit = 1
    for path in sorted((folder or data_folder("models")).glob("*/MODEL.toml")):
        candidate = read_model_toml(path)
        fit = candidate.specificity(facts, names)
        if fit > best_fit:
            best, best_fit = [candidate], fit
        elif fit == best_fit:
            best.append(candidate)
    if len(best) > 1:
        raise RecipeError(f"{best[0].path} and {best[1].path} both fit {names[0]}; narrow one with match_names")
    return best[0] if best else None


def read_model_toml(path: Path) -> ModelToml:
    """Raises RecipeError that names file, table and key."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error
    reader = _Reader(path)
    reader.refuse_unknown(content, _TABLES, "the file")
    model = reader.table(content, "model", _MODEL_KEYS)
    behavior = reader.table(content, "behavior", _BEHAVIOR_KEYS)
    sampling = reader.table(content, "sampling", _PRESETS)
    preset = reader.table(sampling, "non_thinking", _SAMPLING_KEYS, where="sampling.non_thinking")
    return ModelToml(
        path=path,
        name=reader.text(model, "name", "model"),
        hf_id=reader.text(model, "hf_id", "model", otherwise=""),
        match_names=reader.match_names(model),
        model_types=reader.model_types(content),
        sampling={key: reader.number(value, f"sampling.non_thinking.{key}") for key, value in preset.items()},
        thinking_default=reader.flag(behavior, "thinking_default", "behavior"),
        max_thinking_budget=reader.count(behavior, "max_thinking_budget", "behavior"),
    )


class _Reader:
    """Typed access to one file's tables; every complaint starts with the path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refuse_unknown(self, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
                raise RecipeError(f"{self._path}: unknown key `{key}` in {where}; {hint}")

    def table(
        self, parent: Mapping[str, Any], key: str, known: Sequence[str], *, where: str | None = None
    ) -> Mapping[str, Any]:
        table = parent.get(key, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{self._path}: `{where or key}`: expected a table, got {table!r}")
        self.refuse_unknown(table, known, f"[{where or key}]")
        return table

    def text(self, table: Mapping[str, Any], key: str, where: str, *, otherwise: str | None = None) -> str:
        value = table.get(key, otherwise)
        if value is None:
            raise RecipeError(f"{self._path}: `{where}.{key}` is missing")
        if not isinstance(value, str):
            raise RecipeError(f"{self._path}: `{where}.{key}`: expected text, got {value!r}")
        return value

    def number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RecipeError(f"{self._path}: `{where}`: expected a number, got {value!r}")
        return value

    def flag(self, table: Mapping[str, Any], key: str, where: str) -> bool | None:
        value = table.get(key)
        if value is not None and not isinstance(value, bool):
            raise RecipeError(f"{self._path}: `{where}.{key}`: expected true or false, got {value!r}")
        return value

    def count(self, table: Mapping[str, Any], key: str, where: str) -> int | None:
        value = table.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise RecipeError(f"{self._path}: `{where}.{key}`: expected a whole number from 0 up, got {value!r}")
        return value

    def match_names(self, model: Mapping[str, Any]) -> tuple[str, ...]:
        names = model.get("match_names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            raise RecipeError(f"{self._path}: `model.match_names`: expected a list of names, got {names!r}")
        return tuple(name.lower() for name in names)

    def model_types(self, content: Mapping[str, Any]) -> tuple[ModelType, ...]:
        entries = content.get("model_types")
        if not isinstance(entries, list) or not entries:
            raise RecipeError(f"{self._path}: [[model_types]] is missing: which model_type is the file for?")
        types = []
        for entry in entries:
            self.refuse_unknown(entry, _MODEL_TYPE_KEYS, "[[model_types]]")
            hidden_size = entry.get("hidden_size")
            if hidden_size is not None and (isinstance(hidden_size, bool) or not isinstance(hidden_size, int)):
                raise RecipeError(
                    f"{self._path}: `model_types.hidden_size`: expected a whole number, got {hidden_size!r}"
                )
            types.append(ModelType(self.text(entry, "model_type", "model_types"), hidden_size))
        return tuple(types)
