"""Serving recipes: YAML files with a model reference and option defaults. No torch."""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spark_model.data import data_folder
from spark_model.errors import RecipeError
from spark_model.nearest import did_you_mean

Scalar = str | int | float | bool

BUILTIN = "builtin"
BUILTIN_SCOPES = (BUILTIN, "atlas")
SUFFIXES = (".yaml", ".yml")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RUNTIMES = ("atlas", "spark")
MAX_RECIPE_BYTES = 64 << 10

# Keys that would run commands or set up containers: such a recipe is listed with the reason and never started.
EXECUTABLE_KEYS = (
    "pre_exec", "post_exec", "post_commands", "stop_after_post", "mods", "builder", "builder_config", "executor_config",
)  # fmt: skip
# Keys that recipes of other launchers carry and that mean nothing here: no warning.
KNOWN_KEYS = (
    "recipe_version", "model", "model_revision", "runtime", "runtime_version", "container", "min_nodes", "max_nodes",
    "mode", "solo_only", "cluster_only", "name", "description", "metadata", "defaults", "env", "command",
)  # fmt: skip
ENV_NAME = re.compile(r"(ATLAS|SPARK|NCCL)_[A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file. `defaults` maps option names in snake case to scalars, unchecked here.

    model_revision   Hugging Face revision of `model`, if pinned
    min_nodes        ranks that the recipe needs; more than 1 makes it a cluster recipe
    command          a `spark serve` command template with {key} placeholders, unchecked here
    metadata         for display only
    warnings         what was ignored, each a sentence for the operator
    refusals         why it must not be started; empty for a recipe that may run
    """

    name: str
    path: Path
    model: str
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    recipe_version: str = "2"
    model_revision: str | None = None
    runtime: str = "spark"
    min_nodes: int = 1
    max_nodes: int | None = None
    command: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe that was found and not yet read. `source` is "builtin" or the name of a directory."""

    name: str
    source: str
    path: Path


class _UniqueKeyLoader(yaml.SafeLoader):
    """Plain data only, and a key that appears twice is an error instead of a lost setting."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise RecipeError(f"line {key.start_mark.line + 1}: key `{key.value}` appears twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_recipe(path: Path) -> Recipe:
    """Read one recipe file; its name is the file's stem. Raises RecipeError with the file and the key."""
    try:
        return _to_recipe(path, _load(path))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}") from error
    if len(text) > MAX_RECIPE_BYTES:
        raise RecipeError(f"larger than {MAX_RECIPE_BYTES >> 10} KiB, which no recipe is")
    try:
        value = yaml.load(text, _UniqueKeyLoader)  # a SafeLoader
    except RecursionError as error:
        raise RecipeError("nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise RecipeError(f"{where}not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"the top level is {_kind(value)}, wanted a map of keys such as `model` and `defaults`")
    for key in value:
        if not isinstance(key, str):
            raise RecipeError(f"the top level has a key that is {_kind(key)}, wanted a string")
    return value


def _to_recipe(path: Path, content: dict[str, Any]) -> Recipe:
    version = content.get("recipe_version")
    if isinstance(version, bool) or str(version) not in ("1", "2"):
        raise RecipeError(f'`recipe_version` is {_show(version)}, wanted "1" or "2"')
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RecipeError(f"`metadata` is {_kind(metadata)}, wanted a map")
    min_nodes = _nodes(content, "min_nodes", 1)
    max_nodes = _nodes(content, "max_nodes", None)
    if max_nodes is not None and max_nodes < (min_nodes or 1):
        raise RecipeError(f"`max_nodes` is {max_nodes}, less than `min_nodes` {min_nodes}")
    env, env_warnings = _env(content.get("env"))
    unknown = [key for key in content if key not in KNOWN_KEYS and key not in EXECUTABLE_KEYS]
    key_warnings = [f"key `{key}` is unknown and ignored.{did_you_mean(key, KNOWN_KEYS)}" for key in unknown]
    return Recipe(
        name=path.stem,
        path=path,
        model=_text(content, "model", required=True) or "",
        defaults=_defaults(content.get("defaults")),
        env=env,
        description=(_text(metadata, "description") or _text(content, "description") or "").strip(),
        recipe_version=str(version),
        model_revision=_text(content, "model_revision"),
        runtime=_text(content, "runtime") or "",
        min_nodes=min_nodes or 1,
        max_nodes=max_nodes,
        command=_text(content, "command"),
        metadata=metadata,
        warnings=(*key_warnings, *env_warnings),
        refusals=_refusals(content),
    )


def _refusals(content: dict[str, Any]) -> tuple[str, ...]:
    refusals = [
        f"`{key}` would run or configure something outside the server" for key in EXECUTABLE_KEYS if key in content
    ]
    runtime = content.get("runtime")
    if runtime not in RUNTIMES:
        refusals.append(f"`runtime` is {_show(runtime)}, wanted {' or '.join(RUNTIMES)}")
    return tuple(refusals)


def _text(content: Mapping[str, Any], key: str, *, required: bool = False) -> str | None:
    value = content.get(key)
    if value is None and not required:
        return None
    if not isinstance(value, str) or (required and not value.strip()):
        raise RecipeError(f"`{key}` is {_show(value)}, wanted a string")
    return value.strip() if required else value


def _nodes(content: dict[str, Any], key: str, default: int | None) -> int | None:
    value = content.get(key, default)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise RecipeError(f"`{key}` is {_show(value)}, wanted a whole number of at least 1")
    return value


def _defaults(value: Any) -> dict[str, Scalar]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecipeError(f"`defaults` is {_kind(value)}, wanted a map of option names to values")
    for key, setting in value.items():
        if not isinstance(key, str):
            raise RecipeError(f"`defaults` has a key that is {_kind(key)}, wanted an option name")
        if not isinstance(setting, str | int | float):
            hint = "\n  hint: move `env` to the top level of the recipe" if key == "env" else ""
            raise RecipeError(f"`defaults.{key}` is {_kind(setting)}, wanted a string, a number or a boolean{hint}")
    return value


def _env(value: Any) -> tuple[dict[str, str], list[str]]:
    if value is None:
        return {}, []
    if not isinstance(value, dict):
        raise RecipeError(f"`env` is {_kind(value)}, wanted a map of names to strings")
    env: dict[str, str] = {}
    warnings: list[str] = []
    for name, setting in value.items():
        if isinstance(setting, bool) or not isinstance(name, str) or not isinstance(setting, str | int | float):
            raise RecipeError(f"`env.{str(name)[:80]}` is {_kind(setting)}, wanted a string (put it into quotes)")
        if ENV_NAME.fullmatch(name):
            env[name] = str(setting)
        else:
            warnings.append(f"`env.{name}` is ignored: a recipe may set ATLAS_*, SPARK_* and NCCL_* only")
    return env, warnings


def _kind(value: Any) -> str:
    names = {dict: "a map", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "empty" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60] if isinstance(value, str | int | float) else _kind(value)


def list_recipes(recipe_dirs: Sequence[Path] = ()) -> list[RecipeFile]:
    """Every recipe file: the built-in ones first, then each directory's (searched recursively), sorted by name.

    Nothing is read. Raises RecipeError for a directory that does not exist.
    """
    files = _scan(data_folder("recipes"), BUILTIN)
    for directory in recipe_dirs:
        if not directory.is_dir():
            raise RecipeError(f"recipe directory {directory} does not exist")
        files += _scan(directory, directory.resolve().name)
    return files


def _scan(directory: Path, source: str) -> list[RecipeFile]:
    root = directory.resolve()
    paths = [path for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    inside = [path for path in paths if path.resolve().is_relative_to(root) and NAME.fullmatch(path.stem)]
    return sorted(
        (RecipeFile(path.stem, source, path) for path in inside), key=lambda file: (file.name, str(file.path))
    )


def is_recipe_path(reference: str) -> bool:
    return reference.endswith(SUFFIXES)


def locate_recipe(reference: str, recipe_dirs: Sequence[Path] = ()) -> Path | None:
    """The file of `NAME`, `@builtin/NAME`, `@DIRECTORY/NAME` or a path that ends in .yaml; None if there is none.

    A bare name means the built-in recipe where there is one. Raises RecipeError for a name in several places, an
    unknown @scope and a name that no recipe can have.
    """
    if is_recipe_path(reference):
        return Path(reference) if Path(reference).is_file() else None
    files = list_recipes(recipe_dirs)
    scope, name = "", reference
    if reference.startswith("@"):
        scope, _, name = reference[1:].partition("/")
        scope = BUILTIN if scope in BUILTIN_SCOPES else scope
        sources = {BUILTIN, *(directory.resolve().name for directory in recipe_dirs)}
        if scope not in sources:
            raise RecipeError(
                f"no recipe source `@{scope}`; there are {', '.join('@' + each for each in sorted(sources))}"
            )
        if not NAME.fullmatch(name):
            raise RecipeError(f"`{name}` is not a recipe name: wanted letters, digits, `.`, `_` and `-`")
    found = [file for file in files if file.name == name and scope in ("", file.source)]
    builtin = [file for file in found if file.source == BUILTIN]
    found = builtin or found
    if len(found) > 1:
        places = ", ".join(str(file.path) for file in found)
        raise RecipeError(f"recipe `{name}` is ambiguous: {places}; give the path of one")
    return found[0].path if found else None


def find_recipe(reference: str, recipe_dirs: Sequence[Path] = ()) -> Recipe:
    """Locate and read a recipe. Raises RecipeError if there is none (naming near ones) or if it is wrong."""
    path = locate_recipe(reference, recipe_dirs)
    if path is not None:
        return parse_recipe(path)
    if is_recipe_path(reference):
        raise RecipeError(f"{reference}: no such file")
    names = {file.name for file in list_recipes(recipe_dirs)}
    raise RecipeError(f"no recipe named `{reference}`.{did_you_mean(reference.rpartition('/')[2], names)}")
