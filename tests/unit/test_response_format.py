"""The fields by which HTTP clients ask for structured output become one form; a wrong or a second one is refused."""

import json

import pytest

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.request import StructuredKind, StructuredOutput
from kvrelay.router.http.response_format import structured_output

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def form(kind: str, specification: str = "", choices: tuple[str, ...] = ()) -> StructuredOutput:
    return StructuredOutput(kind=StructuredKind(kind), specification=specification, choices=choices)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, form("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            form("json_schema", SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, form("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, form("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"choice": ["a", "b"]}}, form("choice", choices=("a", "b"))),
        ({"guided_json": SCHEMA_TEXT}, form("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "[a-z]+"}, form("regex", "[a-z]+")),
        ({"guided_choice": ["yes", "no"]}, form("choice", choices=("yes", "no"))),
        ({"guided_grammar": 'start: "a"'}, form("grammar", 'start: "a"')),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, form("regex", "a")),
    ],
)
def test_each_field_of_http_becomes_the_same_form(body: dict[str, object], expected: StructuredOutput | None) -> None:
    assert structured_output(body) == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ],
)
def test_a_wrong_or_second_field_is_refused_by_name(body: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        structured_output(body)
    assert caught.value.field == field
