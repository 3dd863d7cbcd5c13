"""Function tools of all protocols: what a protocol read is checked here and becomes the internal request's tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spark_server.errors import InvalidRequestError
from spark_server.request import Tool, ToolChoice

MAX_TOOLS = 1024  # the largest agents send some hundred; all of them stand in the prompt

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")


def create_tool(name: Any, description: Any, parameters: Any, strict: Any, *, where: str) -> Tool:
    """`where` is the path of the function's object in the body. None stands for absent.

    Raises InvalidRequestError naming the key that is wrong.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidRequestError(
            f"Invalid '{where}.name': {name!r}, expected 1 to 64 of the characters a-z, A-Z, 0-9, _ and -.",
            param=f"{where}.name",
        )
    _expect(f"{where}.description", description, str, "a string")
    _expect(f"{where}.parameters", parameters, Mapping, "a JSON Schema object")
    _expect(f"{where}.strict", strict, bool, "true or false")
    return Tool(name, description or "", parameters or {}, bool(strict))


def _expect(where: str, value: Any, kind: type, wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(f"Invalid '{where}': {type(value).__name__}, expected {wanted}.", param=where)


def check_tools(tools: Sequence[Tool], choice: ToolChoice, *, choice_param: str = "tool_choice") -> None:
    """Names are unique, and the choice can be followed. Raises InvalidRequestError."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"Invalid 'tools': {len(tools)} tools, the maximum is {MAX_TOOLS}.", "tools")
    names = [tool.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidRequestError(f"Invalid 'tools': two tools are called '{name}'; names are unique.", "tools")
    if choice.mode in ("required", "named") and not tools:
        raise InvalidRequestError(
            f"'{choice_param}' asks for a call and there are no tools; send 'tools'", choice_param
        )
    if choice.mode == "named" and choice.name not in names:
        raise InvalidRequestError(
            f"Invalid '{choice_param}': there is no tool '{choice.name}'; there are {', '.join(names)}.", choice_param
        )
