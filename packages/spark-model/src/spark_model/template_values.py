"""What a chat template sees of a request, and the functions it may call.

minijinja hands Python containers to templates as they are, methods and all, and turns 1.0 into 1 on the way back to
a Python filter. So messages are copied into containers that refuse to change, and numbers that it would alter travel
as `ExactNumber`.
"""

import json
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

from spark_model.errors import TemplateError

# One render's largest intermediate string, in characters; a 1M-token prompt has about 4M.
MAX_CHARACTERS: Final = 64 * 1024 * 1024
_MAX_WIDTH: Final = 10_000
_PADDING_METHODS: Final = ("center", "ljust", "rjust", "zfill", "expandtabs")


def _refuse_change(self: object, *arguments: object, **named: object) -> NoReturn:
    raise TemplateError("chat templates may not change the messages that they render")


class FrozenList(list[Any]):
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse_change


class FrozenDict(dict[str, Any]):
    clear = pop = popitem = setdefault = update = _refuse_change


class ExactNumber:
    """A number that prints and serializes as Python does; templates cannot calculate with it."""

    __slots__ = ("_value",)

    def __init__(self, value: float) -> None:
        self._value = value

    def __str__(self) -> str:
        return str(self._value)

    __repr__ = __str__


def freeze(value: object) -> object:
    """A copy of JSON-like data that a template cannot change. Raises TemplateError for other objects."""
    match value:
        case None | str() | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**63 else ExactNumber(value)
        case float():
            return ExactNumber(value) if value.is_integer() or "e" in repr(value) else value
        case Mapping():
            return FrozenDict((key, freeze(item)) for key, item in value.items())
        case list() | tuple():
            return FrozenList(freeze(item) for item in value)
    raise TemplateError(f"messages hold JSON values only, got {type(value).__name__}")


def thaw(value: object) -> object:
    return value._value if isinstance(value, ExactNumber) else value


def _bounded(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise TemplateError(f"the chat template makes a text of more than {MAX_CHARACTERS} characters")
    return text


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as transformers defines it: json.dumps, without the escaping of HTML."""
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_WIDTH:
        raise TemplateError(f"tojson: indent is more than {_MAX_WIDTH}")
    return _bounded(
        json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=thaw
        )
    )


def replace(text: object, old: str, new: str, count: int | None = -1) -> str:
    text, count = str(text), -1 if count is None else count
    hits = text.count(old) if count < 0 else min(count, text.count(old))
    if len(text) + hits * (len(new) - len(old)) > MAX_CHARACTERS:
        raise TemplateError(f"replace: the chat template makes a text of more than {MAX_CHARACTERS} characters")
    return text.replace(old, new, count)


def to_int(value: object, default: int = 0, base: int = 10) -> int:
    value = thaw(value)
    try:
        return int(value, base) if isinstance(value, str) else int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return default


def to_float(value: object, default: float = 0.0) -> float:
    try:
        return float(thaw(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return default


def is_iterable(value: object) -> bool:
    return isinstance(value, Iterable)


def is_sequence(value: object) -> bool:
    return isinstance(value, (str, list, tuple, dict))


def is_number(value: object) -> bool:
    return isinstance(thaw(value), (int, float))


def is_integer(value: object) -> bool:
    value = thaw(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_float(value: object) -> bool:
    return isinstance(thaw(value), float)


def python_method(value: Any, name: str, *arguments: Any, **named: Any) -> object:
    """`value.name(…)` for the methods that template_source.py sends here; strings, and `index` of lists."""
    if isinstance(value, list) and name == "index":
        return value.index(*arguments)
    if not isinstance(value, str):
        member = value.get(name) if isinstance(value, Mapping) else None
        if callable(member):
            return member(*arguments, **named)
        raise TemplateError(f"{type(value).__name__} has no method {name!r}")
    if name == "replace":
        return replace(value, *arguments, **named)
    if name == "format":
        return _format(value, *arguments, **named)
    if name in _PADDING_METHODS:
        widths = [argument for argument in (*arguments, *named.values()) if isinstance(argument, int)]
        repeats = value.count("\t") if name == "expandtabs" else 1
        if any(width > _MAX_WIDTH or width * repeats > MAX_CHARACTERS for width in widths):
            raise TemplateError(f"{name}: the width is more than {_MAX_WIDTH}, or the text becomes too long")
    method: Callable[..., object] = getattr(str(value), name)
    return method(*arguments, **named)


def _format(text: str, *arguments: object, **named: object) -> str:
    """str.format without attributes, subscripts, nested fields and wide paddings."""
    for _, field, spec, _ in string.Formatter().parse(text):
        if field is not None and not field.isidentifier() and not field.isdecimal() and field:
            raise TemplateError(f"format: field {field!r} is not a plain name or number")
        if spec and ("{" in spec or any(len(digits) > 4 for digits in _digit_runs(spec))):
            raise TemplateError(f"format: {spec!r} is not a plain format, or is wider than 9999")
    values = [thaw(argument) for argument in arguments]
    return text.format(*values, **{name: thaw(value) for name, value in named.items()})


def _digit_runs(spec: str) -> list[str]:
    return "".join(character if character.isdigit() else " " for character in spec).split()
