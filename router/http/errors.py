"""How an HTTP call ends badly: errors to statuses and OpenAI's bodies, in one place."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvrelay.engine.errors import InvalidArgument, KvrelayError, ResourceExhausted
from kvrelay.router.http.answers import Error, ErrorBody

# code -> status, OpenAI's type of error and, where it has one, its code
_KINDS: Mapping[str, tuple[int, str, str | None]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": (400, "invalid_request_error", None),
        "UNAUTHENTICATED": (401, "invalid_request_error", "invalid_api_key"),
        "NOT_FOUND": (404, "invalid_request_error", "model_not_found"),
        "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "rate_limit_exceeded"),
        "CANCELLED": (499, "server_error", "cancelled"),
        "UNAVAILABLE": (503, "server_error", "unavailable"),
        "DEADLINE_EXCEEDED": (504, "server_error", "deadline_exceeded"),
    }
)
_INTERNAL = (500, "server_error", "internal")

# The names of fields where gRPC's differ.
_PARAMS = {"text": "prompt", "token_ids": "prompt", "chat": "messages"}


class HttpError(KvrelayError):
    """What HTTP alone can get wrong: a path, a method, a body's size."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.http_code = code


def status_of(error: KvrelayError) -> int:
    return error.status if isinstance(error, HttpError) else _KINDS.get(error.code, _INTERNAL)[0]


def body_of(error: KvrelayError) -> bytes:
    """In OpenAI's form."""
    _, kind, code = _KINDS.get(error.code, _INTERNAL)
    if isinstance(error, HttpError):
        kind, code = "server_error" if error.status >= 500 else "invalid_request_error", error.http_code
    return msgspec.json.encode(ErrorBody(Error(error.message, kind, _param(error), code)))


def headers_of(error: KvrelayError) -> list[tuple[bytes, bytes]]:
    """When to come back, in whole seconds and, as OpenAI's clients read it, in milliseconds."""
    if isinstance(error, ResourceExhausted):
        seconds, milliseconds = math.ceil(error.retry_s), math.ceil(1000 * error.retry_s)
        return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % milliseconds)]
    if status_of(error) == 401:
        return [(b"www-authenticate", b"Bearer")]
    return []


def _param(error: KvrelayError) -> str | None:
    if not isinstance(error, InvalidArgument) or not error.field:
        return None
    first, dot, rest = error.field.removeprefix("chat.").partition("[")
    return _PARAMS.get(first, first) + dot + rest
