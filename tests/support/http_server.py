"""An OpenAI-compatible server without a model: counts, in chunks that end anywhere, and keeps what it was asked."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any


class FakeHttpServer:
    """Serves on `url` while `serving` is entered."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, body
        self.num_connections = 0
        self.failures: dict[int, tuple[int, str]] = {}  # status and body of the n-th completion, from 0
        self.chunk_bytes = 7  # of a chunk's body: events do not end where chunks do
        self.has_tokenize = True
        self.stops_short = False
        self.error_in_stream = ""
        self.ends_apart = False  # the finish reason comes in a chunk of its own
        self.handlers: set[asyncio.Task[Any]] = set()
        self._num_completions = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task
        self.handlers.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = head[0].split(" ")[1]
                self.requests.append((path, headers, json.loads(body) if body else None))
                await self._answer(path, self.requests[-1][2], writer)
        writer.close()

    async def _answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            self._plain(writer, 200, json.dumps({"data": [{"id": "fake", "max_model_len": 128}]}))
        elif path == "/tokenize" and self.has_tokenize:
            self._plain(writer, 200, json.dumps({"tokens": [len(word) for word in body["prompt"].split()]}))
        elif path == "/v1/completions":
            number, self._num_completions = self._num_completions, self._num_completions + 1
            if number in self.failures:
                self._plain(writer, *self.failures[number])
            else:
                self._stream(writer, body)
        else:
            self._plain(writer, 404, '{"error": {"message": "no such page"}}')
        await writer.drain()

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode())

    def _stream(self, writer: asyncio.StreamWriter, body: Any) -> None:
        num_tokens, num_prompt = body["max_tokens"], len(body["prompt"])
        ends = [None] * (num_tokens - 1) + ["length"] if not self.ends_apart else [None] * num_tokens + ["length"]
        texts = [f"é{i}" for i in range(num_tokens)] + ([""] if self.ends_apart else [])
        events: list[Any] = [
            {"choices": [{"text": text, "finish_reason": end}]} for text, end in zip(texts, ends, strict=True)
        ]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
        events.append({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}})
        if self.stops_short:
            events = events[:1]
        if self.error_in_stream:
            events[1:] = [{"error": {"message": self.error_in_stream, "code": 503}}]
        text = ": a comment\r\n\r\n" + "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        whole = (text + ("" if self.stops_short else "data: [DONE]\n\n")).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(whole), self.chunk_bytes):
            part = whole[start : start + self.chunk_bytes]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[FakeHttpServer]:
    """A fake server on a free port of the loopback."""
    fake = FakeHttpServer()
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0, limit=2**24)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        await asyncio.gather(*fake.handlers)  # each ends with its connection, which the client has closed
