"""The forms that an answer may be asked to have, in OpenAI's and vLLM's spellings."""

import json
from typing import Any

import pytest

from spark_server.errors import InvalidRequestError
from spark_server.http.testing import create_config
from spark_server.protocols.body import decode_body
from spark_server.protocols.openai_chat_request import ChatBody, lower_chat
from spark_server.protocols.openai_completion_request import CompletionBody, lower_completion
from spark_server.protocols.structure import lower_format
from spark_server.request import Structure

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
GRAMMAR = 'root ::= "x"'


def lower(**fields: Any) -> Structure | None:
    """The same for both endpoints."""
    config = create_config()
    chat = decode_body(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), ChatBody)[0]
    plain = decode_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)[0]
    structure = lower_chat(chat, config)[0].structure
    assert lower_completion(plain, config)[0].structure == structure
    return structure


def described(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json", {"type": "object"})),
        (described(name="n", schema=SCHEMA, strict=True), Structure("json", SCHEMA)),
        (described(name="n", schema=SCHEMA, strict=False), Structure("json", SCHEMA)),
        (described(name="n"), Structure("json", {"type": "object"})),
        ({"guided_json": SCHEMA}, Structure("json", SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, Structure("json", SCHEMA)),
        ({"guided_json": {}}, Structure("json", {})),
        ({"guided_regex": "a+"}, Structure("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Structure("choice", ["a", "b"])),
        ({"guided_grammar": GRAMMAR}, Structure("grammar", GRAMMAR)),
        ({"grammar": GRAMMAR}, Structure("grammar", GRAMMAR)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Structure("json", SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure("json", SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, Structure("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Structure("choice", ["a"])),
        ({"structured_outputs": {"grammar": GRAMMAR}}, Structure("grammar", GRAMMAR)),
        ({"structured_outputs": {"json_object": True}}, Structure("json", {"type": "object"})),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Structure("regex", "a")),
    ],
)
def test_structure(fields: dict[str, Any], expected: Structure | None) -> None:
    assert lower(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (described(schema=SCHEMA), "response_format.json_schema.name"),
        (described(name="n", schema=[]), "response_format.json_schema.schema"),
        (described(name="n", schema=SCHEMA, strict="yes"), "response_format.json_schema.strict"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 3]}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_structure_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        lower(**fields)
    assert caught.value.param == param


def test_lower_format_is_flat_for_other_protocols() -> None:
    asked = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    assert lower_format(asked, "text.format") == Structure("json", SCHEMA)
    with pytest.raises(InvalidRequestError, match="Invalid 'text.format.name': None, expected a name"):
        lower_format({**asked, "name": None}, "text.format")
    with pytest.raises(InvalidRequestError, match="Invalid 'text.format.type': 'xml'"):
        lower_format({"type": "xml"}, "text.format")
