"""How one option is declared: a dataclass field whose annotation is its type and whose metadata is an OptionSpec."""

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias


class Unset(enum.Enum):
    """The type of UNSET: nobody gave the option a value, which differs from giving its default."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET

Value: TypeAlias = bool | int | float | str | Path | tuple[str, ...] | dict[str, Any]

METADATA_KEY: Final = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """What the annotation of an option does not say.

    help            one sentence, in words that stand in --help and in docs/options.md
    unit            of a number: "tokens", "s", "MB", ...
    default         the built-in default; None where there is none
    default_note    what decides where there is no built-in default
    available       False: this build cannot do it; a server refuses to start with it
    accepts         values that mean what this build does anyhow, accepted although not available
    minimum, maximum, above   bounds of a number; `above` is exclusive
    presence_only   a boolean that is given by its name alone; other booleans want true or false
    negatable       a presence-only boolean with a --no- form
    bare            the value that the name alone stands for, in an option that may go without one
    bare_needs_equals   such an option takes its value only as --name=VALUE
    aliases         other spellings of the flag
    recipe_key      the key in a recipe's `defaults` where it is not the option's name
    recipe_aliases  further recipe keys
    recipe_rank     the option's place in a command line that is rendered from a recipe; None: after all others
    in_recipes      False: a recipe may not set it (host specific, or too far-reaching for a file from elsewhere)
    is_secret       its value is not printed
    """

    help: str
    unit: str = ""
    default: Value | None = None
    default_note: str = ""
    available: bool = True
    accepts: tuple[Value, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    presence_only: bool = False
    negatable: bool = False
    bare: str | None = None
    bare_needs_equals: bool = False
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    recipe_key: str = ""
    recipe_aliases: tuple[str, ...] = ()
    recipe_rank: int | None = None
    in_recipes: bool = True
    is_secret: bool = False


def option(help: str, **details: Any) -> Any:  # Any, as dataclasses.field itself is to a type checker
    """A field of a group dataclass that is an option; `details` are OptionSpec's."""
    return field(default=UNSET, metadata={METADATA_KEY: OptionSpec(help=help, **details)})


def switch(help: str, **details: Any) -> Any:
    """A presence-only boolean option."""
    return option(help, presence_only=True, **details)


def tristate(help: str, **details: Any) -> Any:
    """A boolean option that wants true or false; `false` differs from not given."""
    details.setdefault("metavar", "true|false")
    return option(help, **details)
