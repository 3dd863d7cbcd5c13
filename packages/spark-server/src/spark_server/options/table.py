"""All options of `spark serve`, in the order in which --help shows them."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spark_server.options.generation import SamplingOptions, TemplateOptions, ToolOptions
from spark_server.options.media import AdapterOptions, VisionOptions
from spark_server.options.memory import MemoryOptions
from spark_server.options.model import ModelOptions
from spark_server.options.scheduling import CacheOptions, SchedulingOptions
from spark_server.options.server import ServerOptions
from spark_server.options.spec import METADATA_KEY, OptionSpec, Unset
from spark_server.options.speculative import ParallelOptions, SpeculativeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What was asked for, UNSET where nobody asked."""

    model: ModelOptions = field(default_factory=ModelOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    tools: ToolOptions = field(default_factory=ToolOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    vision: VisionOptions = field(default_factory=VisionOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)


ValueType = Literal["bool", "int", "float", "str", "path", "json", "choice", "list"]

_VALUE_TYPES: dict[Any, ValueType] = {bool: "bool", int: "int", float: "float", str: "str", Path: "path"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its declaration together with what follows from its field.

    group    the field of ServeOptions that holds it
    title    the heading it stands under
    choices  the values of a "choice"
    """

    name: str
    group: str
    title: str
    type: ValueType
    choices: tuple[str, ...]
    spec: OptionSpec

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.spec.aliases)

    @property
    def recipe_key(self) -> str:
        return self.spec.recipe_key or self.name

    @property
    def recipe_keys(self) -> tuple[str, ...]:
        return (self.recipe_key, *self.spec.recipe_aliases)

    @property
    def is_accepted_only(self) -> bool:
        """True when the build cannot do it but takes some of its values, because they change nothing."""
        return not self.spec.available and bool(self.spec.accepts)


@functools.cache
def option_table() -> Mapping[str, Option]:
    """Option name → option."""
    table: dict[str, Option] = {}
    for group in dataclasses.fields(ServeOptions):
        group_class = group.default_factory
        assert isinstance(group_class, type)
        annotations = get_type_hints(group_class)
        for declared in dataclasses.fields(group_class):
            value_type, choices = _value_type(annotations[declared.name])
            table[declared.name] = Option(
                name=declared.name,
                group=group.name,
                title=group_class.title,
                type=value_type,
                choices=choices,
                spec=declared.metadata[METADATA_KEY],
            )
    return types.MappingProxyType(table)


@functools.cache
def recipe_table() -> Mapping[str, Option]:
    """Recipe key, alias included → option, in the order in which a recipe is rendered to a command line."""
    ranked = sorted(option_table().values(), key=lambda option: option.spec.recipe_rank or len(option_table()))
    return types.MappingProxyType({key: option for option in ranked for key in option.recipe_keys})


def _value_type(annotation: Any) -> tuple[ValueType, tuple[str, ...]]:
    """`annotation` is `T | Unset`."""
    assert get_origin(annotation) in (Union, types.UnionType)
    (kind,) = (part for part in get_args(annotation) if part is not Unset)
    if get_origin(kind) is Literal:
        return "choice", get_args(kind)
    if get_origin(kind) is tuple:
        return "list", ()
    if get_origin(kind) is dict:
        return "json", ()
    return _VALUE_TYPES[kind], ()
