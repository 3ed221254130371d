"""The fields by which HTTP clients ask for structured output, as one value: OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*`. Pure: JSON values in, no web framework.
"""

from collections.abc import Iterator, Mapping
from typing import NoReturn

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.request import StructuredKind, StructuredOutput

_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
FIELDS = ("response_format", "structured_outputs", *_GUIDED)


def structured_output(body: Mapping[str, object]) -> StructuredOutput | None:
    """What `body`, a request's JSON object, asks for; None: free text. Null is as good as absent.

    Raises: InvalidArgument, also where two fields ask.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        (first, _), (second, _) = asked[:2]
        raise InvalidArgument(second, body.get(second.split(".")[0]), f"one form an output: {first} is given too")
    return asked[0][1] if asked else None


def _asked(body: Mapping[str, object]) -> Iterator[tuple[str, StructuredOutput]]:
    if (value := body.get("response_format")) is not None:
        form = _response_format(value)
        if form is not None:
            yield "response_format", form
    if (value := body.get("structured_outputs")) is not None:
        if not isinstance(value, Mapping):
            _refuse("structured_outputs", value, "must be an object")
        for name, inner in value.items():
            if inner is not None:
                yield from _constraint(f"structured_outputs.{name}", name, inner)
    for field, name in _GUIDED.items():
        if (value := body.get(field)) is not None:
            yield from _constraint(field, name, value)


def _response_format(value: object) -> StructuredOutput | None:
    if not isinstance(value, Mapping):
        _refuse("response_format", value, "must be an object")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput.json_object()
        case "json_schema":
            outer = value.get("json_schema")
            if not isinstance(outer, Mapping):
                _refuse("response_format.json_schema", outer, "must be an object")
            field = "response_format.json_schema.schema"
            if not isinstance(schema := outer.get("schema"), Mapping):
                _refuse(field, schema, "must be an object")
            return _schema(field, schema)
        case other:
            raise InvalidArgument("response_format.type", other, "must be text, json_object or json_schema")


def _constraint(field: str, name: str, value: object) -> Iterator[tuple[str, StructuredOutput]]:
    match name:
        case "json":
            yield field, _schema(field, value)
        case "json_object":
            if not isinstance(value, bool):
                _refuse(field, value, "must be true or false")
            if value:
                yield field, StructuredOutput.json_object()
        case "regex" | "grammar":
            if not isinstance(value, str):
                _refuse(field, value, "must be a string")
            yield field, StructuredOutput(kind=StructuredKind(name), specification=value)
        case "choice":
            if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
                _refuse(field, value, "must be a list of strings")
            yield field, StructuredOutput.choice(value)
        case _:
            _refuse(field, value, "must be json, json_object, regex, choice or grammar")


def _schema(field: str, value: object) -> StructuredOutput:
    if not isinstance(value, str | Mapping):
        _refuse(field, value, "must be an object, or one as a string")
    try:
        return StructuredOutput.json_schema(value)
    except RecursionError:
        raise InvalidArgument(field, "...", "is nested too deeply") from None


def _refuse(field: str, value: object, limit: str) -> NoReturn:
    raise InvalidArgument(field, value, limit)
