"""Language models of spark: a name becomes files, files become a model. Importing this package imports no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_model.notebook import LoadedModel, load

__all__ = ["LoadedModel", "load"]


def __getattr__(name: str) -> Any:  # PEP 562: `load` needs torch, the rest of the package does not
    if name in __all__:
        from spark_model import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module 'spark_model' has no attribute {name!r}")
