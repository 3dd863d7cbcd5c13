"""The form that an answer has to have: OpenAI's response_format, and structured outputs as vLLM spells them.

`lower_format` is for protocols whose only way is a schema; the others are for OpenAI's two generating endpoints.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from spark_server.errors import InvalidRequestError
from spark_server.request import Structure

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class StructureFields(Protocol):
    """The body fields that are read here; all are optional and unchecked."""

    @property
    def response_format(self) -> Any: ...
    @property
    def structured_outputs(self) -> Any: ...
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> Any: ...
    @property
    def guided_choice(self) -> Any: ...
    @property
    def guided_grammar(self) -> Any: ...
    @property
    def grammar(self) -> Any: ...


def lower_structure(body: StructureFields) -> Structure | None:
    """The one structure that a body asks for. Raises InvalidRequestError for a wrong one and for more than one."""
    found = list(_find(body))
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name, _ in found)
        raise InvalidRequestError(f"{names} ask for different forms of one answer; keep one of them", found[1][0])
    return found[0][1] if found else None


def _find(body: StructureFields) -> Iterator[tuple[str, Structure]]:
    if body.response_format is not None:
        structure = _lower_response_format(body.response_format)
        if structure is not None:
            yield "response_format", structure
    if body.structured_outputs is not None:
        yield "structured_outputs", _lower_structured_outputs(body.structured_outputs)
    for name, kind in (
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
        ("grammar", "grammar"),
    ):
        value = getattr(body, name)
        if value is not None:
            yield name, _lower_value(kind, value, name)


def _lower_response_format(value: Any) -> Structure | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "json_schema":
        return lower_format(value, name)
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise InvalidRequestError(f"Invalid '{name}.json_schema': expected an object with name and schema.", name)
    return lower_format({**described, "type": kind}, f"{name}.json_schema", type_param=name)


def lower_format(value: Any, where: str, *, type_param: str | None = None) -> Structure | None:
    """{type: text | json_object | json_schema, name, schema, strict}, flat; None for text.

    A schema binds whatever `strict` says. Raises InvalidRequestError; `where` is the object's path in the body.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure("json", ANY_OBJECT)
    if kind != "json_schema":
        wanted = "'text', 'json_object' or 'json_schema'"
        raise InvalidRequestError(f"Invalid '{where}.type': {kind!r}, expected {wanted}.", type_param or where)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise InvalidRequestError(f"Invalid '{where}.name': {value.get('name')!r}, expected a name.", f"{where}.name")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"Invalid '{where}.strict': {strict!r}, expected true or false.", f"{where}.strict")
    schema = value.get("schema")
    return Structure("json", ANY_OBJECT if schema is None else _check_schema(schema, f"{where}.schema"))


def _lower_structured_outputs(value: Any) -> Structure:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"Invalid '{name}': expected an object.", name)
    kinds = ("json", "regex", "choice", "grammar")
    if value.get("structural_tag") is not None:
        raise InvalidRequestError(
            f"'{name}.structural_tag' is not available in this build; leave it out",
            f"{name}.structural_tag",
            "unsupported_parameter",
        )
    asked = [kind for kind in kinds if value.get(kind) is not None]
    if value.get("json_object"):
        if asked:
            raise InvalidRequestError(f"Invalid '{name}': json_object and {asked[0]}, expected one of them.", name)
        return Structure("json", ANY_OBJECT)
    if len(asked) != 1:
        got = " and ".join(asked) or "none"
        raise InvalidRequestError(f"Invalid '{name}': {got}, expected exactly one of {', '.join(kinds)}.", name)
    return _lower_value(asked[0], value[asked[0]], f"{name}.{asked[0]}")


def _lower_value(kind: str, value: Any, where: str) -> Structure:
    match kind:
        case "json":
            return Structure("json", _check_schema(_decode_schema(value, where), where))
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
                raise InvalidRequestError(f"Invalid '{where}': expected an array of strings that are not empty.", where)
            return Structure("choice", value)
        case _:
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"Invalid '{where}': expected a string that is not empty.", where)
            return Structure("regex" if kind == "regex" else "grammar", value)


def _decode_schema(value: Any, where: str) -> Any:
    """A schema may be sent as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"Invalid '{where}': the string is not valid JSON: {error}", where) from None


def _check_schema(value: Any, where: str) -> Any:
    if not isinstance(value, Mapping | bool):
        raise InvalidRequestError(f"Invalid '{where}': {type(value).__name__}, expected a JSON Schema object.", where)
    return {} if value is True else value
