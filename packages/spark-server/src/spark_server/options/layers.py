"""Where values come from: flags, environment, recipe, built-in defaults; the first that has one wins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from spark_model.recipes import Recipe
from spark_server.config import Origin
from spark_server.options.spec import Value
from spark_server.options.table import Option, ServeOptions, option_table, recipe_table
from spark_server.options.values import parse_value, render_value, suggest

# Decided before the recipe is read, so a recipe that sets one would be ignored.
_BEFORE_THE_RECIPE = {
    "model_from_path": "write the path as the recipe's `model`",
    "cache_dir": "give --cache-dir or set HF_HUB_CACHE",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The values from one origin.

    values    option name → value, for what was given and understood
    labels    option name → how the user wrote it, for messages
    problems  what was given and not understood: what, why, fix
    """

    origin: Origin
    values: Mapping[str, Value]
    labels: Mapping[str, str]
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Merged:
    """All layers in one: the options, and for each that has a value where it comes from and how it was written."""

    options: ServeOptions
    values: Mapping[str, Value]
    origin: Mapping[str, Origin]
    labels: Mapping[str, str]


def read_flags(given: Mapping[str, object]) -> Layer:
    """`given` maps option names to text, to True or False for presence-only options, to lists for repeatable ones."""
    reader = _Reader("flag")
    for name, raw in given.items():
        option = option_table()[name]
        if isinstance(raw, bool):
            flag = option.flag if raw or not option.spec.negatable else "--no-" + option.flag.removeprefix("--")
            reader.put(option, flag, raw)
        elif isinstance(raw, (list, tuple)):
            reader.put(option, option.flag, tuple(str(item) for item in raw))
        else:
            reader.parse(option, option.flag, str(raw))
    return reader.layer()


def read_environment(given: Mapping[str, tuple[str, str]]) -> Layer:
    """`given` maps option names to the variable's name and its text (env.py reads them)."""
    reader = _Reader("env")
    for name, (variable, text) in given.items():
        option = option_table()[name]
        if option.spec.presence_only:
            if text not in ("", "0"):
                reader.put(option, f"{variable}={text}", True)
        elif text:
            reader.parse(option, f"{variable}", text)
    return reader.layer()


def read_recipe(recipe: Recipe) -> Layer:
    reader = _Reader("recipe")
    table = recipe_table()
    written: dict[str, str] = {}
    for key, scalar in recipe.defaults.items():
        label = f"recipe {recipe.name}: {key}"
        option = table.get(key)
        if option is None:
            reader.refuse(f"{label}: unknown key{_suggest_key(key)}")
            continue
        if option.name in written:
            reader.refuse(f"{label}: means the same as `{written[option.name]}`; keep one of them")
            continue
        written[option.name] = key
        if option.name in _BEFORE_THE_RECIPE:
            reader.refuse(f"{label}: a recipe cannot set it; {_BEFORE_THE_RECIPE[option.name]}")
        elif not option.spec.in_recipes:
            reader.refuse(f"{label}: a recipe may not set it; give {option.flag} on the command line")
        elif option.spec.presence_only:
            if isinstance(scalar, bool):
                reader.put(option, f"{label} {render_value(scalar)}", scalar)
            else:
                reader.refuse(f"{label} {scalar}: expected true or false")
        else:
            reader.parse(option, label, render_value(scalar))
    return reader.layer()


def built_in_defaults() -> Layer:
    values = {name: option.spec.default for name, option in option_table().items() if option.spec.default is not None}
    return Layer("default", values, {})


def merge(layers: Sequence[Layer]) -> Merged:
    """The first layer that has a value for an option decides it."""
    values: dict[str, Value] = {}
    origin: dict[str, Origin] = {}
    labels: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.values.items():
            if name not in values:
                values[name] = value
                origin[name] = layer.origin
                labels[name] = layer.labels.get(name, name)
    return Merged(_to_options(values), values, origin, labels)


def _to_options(values: Mapping[str, Value]) -> ServeOptions:
    grouped: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        grouped.setdefault(option_table()[name].group, {})[name] = value
    groups: dict[str, Any] = {}
    for group in fields(ServeOptions):
        assert isinstance(group.default_factory, type)
        groups[group.name] = group.default_factory(**grouped.get(group.name, {}))
    return ServeOptions(**groups)


class _Reader:
    """Collects one layer."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._values: dict[str, Value] = {}
        self._labels: dict[str, str] = {}
        self._problems: list[str] = []

    def put(self, option: Option, label: str, value: Value) -> None:
        self._values[option.name] = value
        self._labels[option.name] = label

    def parse(self, option: Option, label: str, text: str) -> None:
        try:
            value = parse_value(option, text)
        except ValueError as error:
            self.refuse(
                f"{label} {text!r}: {error}" if text != text.strip() or not text else f"{label} {text}: {error}"
            )
            return
        self.put(option, label if option.spec.is_secret else f"{label} {render_value(value)}", value)

    def refuse(self, problem: str) -> None:
        self._problems.append(problem)

    def layer(self) -> Layer:
        return Layer(self._origin, self._values, self._labels, self._problems)


def _suggest_key(key: str) -> str:
    renamed = option_table().get(key)
    if renamed is not None:  # the flag's spelling instead of the recipe's
        return f"; a recipe writes {renamed.recipe_key}"
    return suggest(key, recipe_table())
