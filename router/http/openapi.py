"""The HTTP API's own description, OpenAPI 3.1, made of the types that read and write its bodies."""

from functools import cache
from typing import Any

import msgspec

from kvrelay import __version__
from kvrelay.router.http.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    Health,
    ModelList,
    Text,
    Tokens,
)
from kvrelay.router.http.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request is wrong, and will be wrong again.",
    "401": "No API key, or not one of this router's.",
    "404": "Another model is served.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "429": "Too much waits already; Retry-After says when to come back.",
    "500": "A bug.",
    "503": "No node can serve this now.",
    "504": "Not finished in time.",
}

# path, method -> what it is for, the body's type, the answer's, the type of a stream's events
_ROUTES: dict[tuple[str, str], tuple[str, type | None, type, type | None]] = {
    ("/v1/completions", "post"): ("Go on from a text.", CompletionRequest, Completion, Completion),
    ("/v1/chat/completions", "post"): ("Answer a chat.", ChatCompletionRequest, ChatCompletion, ChatCompletionChunk),
    ("/v1/models", "get"): ("What is served.", None, ModelList, None),
    ("/tokenize", "post"): ("A text's tokens, or a chat's as the model would get it.", TokenizeRequest, Tokens, None),
    ("/detokenize", "post"): ("Tokens' text.", DetokenizeRequest, Text, None),
    ("/health", "get"): ("Whether requests can be served.", None, Health, None),
}
_OPEN = ("/health",)


@cache
def make_document(model: str) -> bytes:
    """As JSON. `model`: the name of what is served."""
    asked = [body for _, body, _, _ in _ROUTES.values() if body]
    answered = [kind for _, _, *kinds in _ROUTES.values() for kind in kinds if kind]
    _, schemas = msgspec.json.schema_components([*asked, *answered, ErrorBody], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (what, body, answer, events) in _ROUTES.items():
        paths.setdefault(path, {})[method] = _operation(path, what, body, answer, events)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvrelay", "version": __version__, "description": f"Serves {model}."},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(path: str, what: str, body: type | None, answer: type, events: type | None) -> dict[str, Any]:
    content = {"application/json": _schema(answer)}
    if events is not None:
        content["text/event-stream"] = {"schema": {"type": "string", "description": f"Events of {events.__name__}."}}
    answers = {"200": {"description": "Done.", "content": content}}
    statuses = ("503",) if path in _OPEN else _ERRORS if body else ("401", "413", "500")
    for status in statuses:
        answers[status] = {"description": _ERRORS[status], "content": {"application/json": _schema(ErrorBody)}}
    operation: dict[str, Any] = {"summary": what, "responses": answers}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(body)}}
    if path not in _OPEN:
        operation["security"] = [{}, {"key": []}]
    return operation


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
