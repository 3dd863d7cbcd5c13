"""Errors between a model's name and its logits."""

from spark_kernels.errors import SparkError


class ModelError(SparkError):
    """A model cannot be found, read or run."""


class ModelNotFoundError(ModelError):
    """A model reference resolves to nothing; the message says where was looked."""


class RecipeError(ModelError):
    """A recipe or MODEL.toml file is wrong."""


class CheckpointError(ModelError):
    """A checkpoint file is truncated, corrupt, hostile or of an unknown kind."""


class WeightMissingError(ModelError):
    """A tensor is missing, misshapen or unknown; the message names it, its file and the nearest known name."""


class UnsupportedModelError(ModelError):
    """The architecture, or a feature that its config asks for, is not in this build."""


class TokenizerError(ModelError):
    """The tokenizer's files are missing or cannot be understood."""


class TemplateError(ModelError):
    """A chat template is wrong, or refused the conversation (`raise_exception`)."""
