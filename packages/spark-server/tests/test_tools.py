"""Function tools: what is accepted, and which key a complaint names."""

from typing import Any

import pytest

from spark_server.errors import InvalidRequestError
from spark_server.protocols.tools import check_tools, create_tool
from spark_server.request import Tool, ToolChoice

WHERE = "tools[0].function"


def test_create_tool() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    assert create_tool("get_x-1", "Gets x.", schema, True, where=WHERE) == Tool("get_x-1", "Gets x.", schema, True)
    assert create_tool("f" * 64, None, None, None, where=WHERE) == Tool("f" * 64)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *[({"name": name}, "name") for name in ("", "f" * 65, "a b", "é", "a.b", "f\n", None, 3)],
        ({"description": 3}, "description"),
        ({"parameters": []}, "parameters"),
        ({"parameters": "{}"}, "parameters"),
        ({"strict": "yes"}, "strict"),
    ],
)
def test_create_tool_refuses_by_name(changes: dict[str, Any], param: str) -> None:
    fields: dict[str, Any] = {"name": "f", "description": "", "parameters": {}, "strict": False, **changes}
    with pytest.raises(InvalidRequestError) as caught:
        create_tool(**fields, where=WHERE)
    assert caught.value.param == f"{WHERE}.{param}"


def test_check_tools() -> None:
    tools = [Tool("a"), Tool("b")]
    for choice in (ToolChoice(), ToolChoice("none"), ToolChoice("required"), ToolChoice("named", "b")):
        check_tools(tools, choice)
    check_tools([], ToolChoice())


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([Tool("a"), Tool("a")], ToolChoice(), "tools"),
        ([], ToolChoice("required"), "tool_choice"),
        ([], ToolChoice("named", "a"), "tool_choice"),
        ([Tool("a")], ToolChoice("named", "b"), "tool_choice"),
        ([Tool(f"f{place}") for place in range(1025)], ToolChoice(), "tools"),
    ],
)
def test_check_tools_refuses(tools: list[Tool], choice: ToolChoice, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(tools, choice)
    assert caught.value.param == param
