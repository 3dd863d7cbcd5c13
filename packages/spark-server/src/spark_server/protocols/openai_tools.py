"""Tools and tool_choice of chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from spark_server.errors import InvalidRequestError
from spark_server.protocols.tools import check_tools, create_tool
from spark_server.request import Tool, ToolChoice


def lower_tools(tools: Sequence[Any] | None, choice: Any) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools that the model gets to see, and what it may do with them. Raises InvalidRequestError."""
    lowered = [_lower_tool(place, tool) for place, tool in enumerate(tools or [])]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        lowered, picked = _allow_tools(lowered, choice.get("allowed_tools"))
    else:
        picked = _lower_choice(choice)
    check_tools(lowered, picked)
    return (() if picked.mode == "none" else tuple(lowered)), picked


def _lower_tool(place: int, tool: Any) -> Tool:
    where = f"tools[{place}]"
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise InvalidRequestError(
            f"{where}.type: {kind!r} tools are not available in this build, only 'function'",
            param=f"{where}.type",
            code="unsupported_tool",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{where}.function: expected an object with the function's name.", f"{where}.function"
        )
    names = ("name", "description", "parameters", "strict")
    name, description, parameters, strict = (function.get(key) for key in names)
    return create_tool(name, description, parameters, strict, where=f"{where}.function")


def _lower_choice(choice: Any) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("named", name)
        case {"type": "custom"}:
            raise InvalidRequestError(
                "'custom' tools are not available in this build, only 'function'", "tool_choice", "unsupported_tool"
            )
    raise InvalidRequestError(
        "Invalid 'tool_choice': expected 'none', 'auto', 'required' or "
        '{"type": "function", "function": {"name": ...}}.',
        "tool_choice",
    )


def _allow_tools(tools: Sequence[Tool], allowed: Any) -> tuple[list[Tool], ToolChoice]:
    """Those of the tools that the choice allows, and its mode."""
    param = "tool_choice.allowed_tools"
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": [*entries]}:
            names = [_allowed_name(entry, param) for entry in entries]
        case _:
            raise InvalidRequestError(f"Invalid '{param}': expected mode 'auto' or 'required', and tools.", param)
    known = [tool.name for tool in tools]
    for name in names:
        if name not in known:
            raise InvalidRequestError(f"Invalid '{param}': there is no tool '{name}' in 'tools'.", param)
    return [tool for tool in tools if tool.name in names], ToolChoice(mode)


def _allowed_name(entry: Any, param: str) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequestError(
        f'Invalid \'{param}.tools\': expected {{"type": "function", "function": {{"name": ...}}}}.', param
    )
