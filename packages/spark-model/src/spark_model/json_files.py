"""JSON files of a checkpoint, which are not trusted. No torch."""

import json
from pathlib import Path
from typing import Any

from spark_model.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # the index of a model with 100,000s of expert tensors takes about 25 MB


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """`text` as a JSON object; `what` begins the message of the CheckpointError for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise CheckpointError(f"{what}: nested too deep") from error
    except ValueError as error:  # includes bad UTF-8 and JSONDecodeError
        raise CheckpointError(f"{what}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: wanted a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if the file is missing, larger than MAX_JSON_BYTES or not one JSON object."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than the {MAX_JSON_BYTES >> 20} MiB that are read")
    return parse_json_object(text, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {duplicate[:80]!r} appears twice")
    return unique
