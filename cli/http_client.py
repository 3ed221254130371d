"""A client of an OpenAI-compatible HTTP endpoint, for loads: no more of HTTP/1.1 than that takes, and cheap.

It stands on asyncio's streams alone, for a load shares its machine with the server: a chunk costs a line, a read and a
JSON parse. Connections are kept and used again.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from kvrelay.cli.client import Piece, Usage, own_api_key
from kvrelay.engine.errors import KvrelayError, RemoteError, Unavailable

_MAX_LINE = 16 * 2**20
_CODES = {
    400: ("INVALID_ARGUMENT", False),
    401: ("UNAUTHENTICATED", False),
    403: ("UNAUTHENTICATED", False),
    404: ("NOT_FOUND", False),
    408: ("DEADLINE_EXCEEDED", False),
    413: ("INVALID_ARGUMENT", False),
    422: ("INVALID_ARGUMENT", False),
    429: ("RESOURCE_EXHAUSTED", True),
    503: ("UNAVAILABLE", True),
    504: ("DEADLINE_EXCEEDED", False),
}


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """Asks one server. Every method raises KvrelayError."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        key = own_api_key()
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def complete(self, body: dict[str, Any], *, timeout_s: float) -> AsyncGenerator[Piece, None]:
        """Stream one completion: a piece a message; the last has the finish reason and the usage."""
        finish_reason, usage, is_done = "", None, False
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._lines("POST", "/v1/completions", asked)) as lines:
                async for line in lines:  # to the body's end, so that the connection can be used again
                    if is_done or not line.startswith(b"data:"):
                        continue
                    if line[5:].strip() == b"[DONE]":
                        is_done = True
                        continue
                    event = _parse(line[5:])
                    _raise_error(event)
                    usage = _usage(event["usage"]) if event.get("usage") else usage
                    for choice in event.get("choices", ()):
                        finish_reason = choice.get("finish_reason") or ""
                        yield Piece(text=choice.get("text") or "", finish_reason=finish_reason)
            if not is_done or not finish_reason:
                raise Unavailable("the answer stopped before its end")
            yield Piece(finish_reason=finish_reason, usage=usage)
        except TimeoutError:
            raise RemoteError("DEADLINE_EXCEEDED", f"no end within {timeout_s} s", False) from None

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
        """One answer as JSON."""
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._lines(method, path, body)) as lines:
                return _parse(b"\n".join([line async for line in lines]))
        except TimeoutError:
            raise Unavailable(f"{path}: no answer within {timeout_s} s") from None

    # --- HTTP

    async def _lines(self, method: str, path: str, body: dict[str, Any] | None = None) -> AsyncGenerator[bytes, None]:
        """The body of a response line by line, without line ends."""
        connection, is_whole = await self._send(method, path, body), False
        try:
            status, headers = await _read_head(connection.reader)
            if status != 200:
                raise _refusal(status, b"".join([part async for part in _read_body(connection.reader, headers)]))
            rest = b""
            async for part in _read_body(connection.reader, headers):
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line.rstrip(b"\r")
            if rest:
                yield rest
            is_whole = headers.get("connection", "").lower() != "close" and bool(
                {"content-length", "transfer-encoding"} & headers.keys()
            )
        except (OSError, EOFError, ValueError) as error:
            raise Unavailable(f"{self._host}:{self._port}: {error or type(error).__name__}") from error
        finally:
            if is_whole:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> _Connection:
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n" if payload else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n"
        connection = await self._connect()
        connection.writer.write(head.encode() + payload)
        return connection

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        context = ssl.create_default_context() if self._tls else None
        try:
            opened = await asyncio.open_connection(self._host, self._port, ssl=context, limit=_MAX_LINE)
        except OSError as error:
            raise Unavailable(f"nobody answers at {self._host}:{self._port}: {error}") from error
        return _Connection(*opened)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case. Raises: ValueError, EOFError, OSError."""
    line = await _read_line(reader)
    words = line.decode("latin-1").split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].strip().isdigit():
        raise ValueError(f"no HTTP/1: {line[:60]!r}")
    headers: dict[str, str] = {}
    while (line := await _read_line(reader)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Parts as they come. Raises: ValueError, EOFError, OSError."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await _read_line(reader)).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        while (await _read_line(reader)).strip():
            pass
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left:
            part = await reader.read(min(left, 65536))
            if not part:
                raise EOFError("the connection was closed")
            left -= len(part)
            yield part
    else:
        while part := await reader.read(65536):
            yield part


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """A whole line: of one that is cut off, `readline` would give what there is, and 2 is not 200."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection was closed")
    return line


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unavailable(f"the server's answer is no JSON: {text[:60]!r}") from error


def _raise_error(event: Any) -> None:
    """For an error that comes within a stream."""
    error = event.get("error") if isinstance(event, dict) else {"message": "no object in the stream"}
    if error:
        message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
        raise _error(code if isinstance(code, int) else 500, str(message))


def _refusal(status: int, body: bytes) -> KvrelayError:
    message = body.decode(errors="replace")
    try:
        found = json.loads(body)
        found = found.get("error", found)
        message = str(found.get("message", message) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return _error(status, " ".join(message.split())[:500] or f"HTTP {status}")


def _error(status: int, message: str) -> KvrelayError:
    code, retryable = _CODES.get(status, ("INTERNAL", False))
    return RemoteError(code, f"HTTP {status}: {message}", retryable)


def _usage(found: dict[str, Any]) -> Usage:
    details = found.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=found.get("prompt_tokens") or 0,
        completion_tokens=found.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
    )
