"""The local Hugging Face cache, and downloads into it when they were asked for. No torch.

huggingface_hub is imported inside the functions: it takes half a second, and most references never come here.
"""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from spark_model.errors import ModelNotFoundError

REPO_REFERENCE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
DEFAULT_REVISION = "main"
METADATA_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt")


@dataclass(frozen=True, slots=True)
class RepoReference:
    """`org/name` or `org/name@revision` (a branch, a tag or a commit)."""

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


def parse_repo_reference(reference: str) -> RepoReference | None:
    """None if `reference` cannot be a Hugging Face id."""
    match = REPO_REFERENCE.fullmatch(reference)
    if match is None or ".." in reference or "--" in match["repo"]:
        return None
    return RepoReference(match["repo"], match["revision"] or DEFAULT_REVISION)


def cache_directory(cache_dir: Path | None) -> Path:
    """`cache_dir`, else HF_HUB_CACHE, HF_HOME/hub or the default place."""
    if cache_dir is not None:
        return cache_dir.expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_snapshot(reference: RepoReference, cache: Path) -> Path | None:
    """The snapshot directory of a revision in the cache, complete or not; None if there is none. Opens no socket."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(reference.repo, "config.json", cache_dir=cache, revision=reference.revision)
    if isinstance(config, str):
        return Path(config).parent
    if not cache.is_dir():
        return None
    from huggingface_hub import scan_cache_dir

    for repo in scan_cache_dir(cache).repos:
        if repo.repo_type == "model" and repo.repo_id == reference.repo:
            for revision in repo.revisions:
                if reference.revision == revision.commit_hash or reference.revision in revision.refs:
                    return revision.snapshot_path
    return None


def cached_repos(cache: Path) -> list[str]:
    """The ids of the models in the cache, whatever their state."""
    if not cache.is_dir():
        return []
    return sorted(entry.name[len("models--") :].replace("--", "/") for entry in cache.glob("models--*"))


def download_snapshot(reference: RepoReference, cache: Path) -> Path:
    """Fetch what serving needs from the Hub (HF_ENDPOINT): safetensors, else the one GGUF model, and small files.

    Raises ModelNotFoundError if the Hub cannot be reached or has nothing to serve under that name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError

    try:
        files = snapshot_download(reference.repo, revision=reference.revision, cache_dir=cache, dry_run=True)
        wanted = _wanted_files(reference, [file.filename for file in files])
        path = snapshot_download(reference.repo, revision=reference.revision, cache_dir=cache, allow_patterns=wanted)
    except (DryRunError, HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError is an OSError
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ModelNotFoundError(f"{reference}: cannot be downloaded: {reason}") from error
    return Path(path)


def _wanted_files(reference: RepoReference, files: list[str]) -> list[str]:
    top = [file for file in files if "/" not in file]
    small = [file for file in top if any(fnmatch.fnmatchcase(file, pattern) for pattern in METADATA_PATTERNS)]
    weights = [file for file in top if file.startswith("model") and file.endswith(".safetensors")]
    if weights:
        return small + weights
    models = [file for file in top if file.endswith(".gguf") and not file.startswith("mmproj")]
    firsts = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", file) for file in models}
    if len(firsts) != 1:
        found = (
            f"{len(firsts)} GGUF models: {', '.join(sorted(firsts)[:6])}" if firsts else "no safetensors and no GGUF"
        )
        hint = f"\n  hint: fetch one with `hf download {reference.repo} FILE` and give its path" if firsts else ""
        raise ModelNotFoundError(f"{reference}: the repository has {found}{hint}")
    return small + models
