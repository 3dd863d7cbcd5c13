"""Weights of a checkpoint as torch tensors."""

from spark_model.checkpoint import Checkpoint
from spark_model.loaders.gguf import GgufSource
from spark_model.loaders.progress import ProgressReport, terminal_progress
from spark_model.loaders.safetensors import SafetensorsSource
from spark_model.loaders.source import WeightSource, missing_weight

__all__ = ["ProgressReport", "WeightSource", "missing_weight", "open_weights", "terminal_progress"]


def open_weights(checkpoint: Checkpoint, *, progress: ProgressReport | None = None) -> WeightSource:
    """Open and check a checkpoint's weight files; tensors are mapped and read when they are used.

    progress   called with (bytes taken, bytes in all) as tensors are taken; `terminal_progress` gives one
    Raises CheckpointError if a file is missing, truncated, corrupt or of an unknown kind.
    """
    if checkpoint.kind == "gguf":
        return GgufSource(checkpoint.path, progress)
    return SafetensorsSource(checkpoint.path, progress)
