"""Serving recipes: YAML files with a model reference and option defaults. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file. `defaults` maps option names in snake case to scalars, unchecked here."""

    name: str
    path: Path
    model: str
    defaults: Mapping[str, Scalar] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
