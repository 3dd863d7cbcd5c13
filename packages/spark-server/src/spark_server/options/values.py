"""Text to value and back. Flags, environment variables and recipes all go through here."""

import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from spark_server.options.spec import Value
from spark_server.options.table import Option

Number = TypeVar("Number", int, float)


def parse_value(option: Option, text: str) -> Value:
    """Raises ValueError with what was expected; the caller names the option and the value."""
    match option.type:
        case "bool":
            return _parse_bool(text)
        case "int":
            return _in_bounds(option, _parse_int(text))
        case "float":
            return _in_bounds(option, _parse_float(text))
        case "choice":
            if text not in option.choices:
                raise ValueError(f"expected one of {', '.join(option.choices)}{suggest(text, option.choices)}")
            return text
        case "json":
            return _parse_object(text)
        case "path":
            return Path(_not_blank(text))
        case "list":
            return (_not_blank(text),)
        case "str":
            return _not_blank(text)


def render_value(value: Value) -> str:
    """The shortest text that parse_value turns into `value`; lower-case booleans, as the flags want them."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(int(value)) if value.is_integer() else repr(value)
        case dict():
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        case tuple():
            return ",".join(value)
        case _:
            return str(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _in_bounds(option: Option, number: Number) -> Number:
    spec = option.spec
    unit = f" {spec.unit}" if spec.unit else ""
    if spec.minimum is not None and number < spec.minimum:
        raise ValueError(f"expected at least {render_value(spec.minimum)}{unit}")
    if spec.above is not None and number <= spec.above:
        raise ValueError(f"expected more than {render_value(spec.above)}{unit}")
    if spec.maximum is not None and number > spec.maximum:
        raise ValueError(f"expected at most {render_value(spec.maximum)}{unit}")
    return number


def _parse_object(text: str) -> dict[str, Value]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a JSON object ({error})") from None
    if isinstance(value, dict):
        return value
    raise ValueError('expected a JSON object, such as {"enable_thinking": false}')


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("expected a value, got nothing")
    return text
