"""A real router with its HTTP edge, fake nodes that answer everything from a table, and ways to call it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.router_harness import Harness, running_router
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.proto import node_pb2

TEXT = " the capital of France is Paris, and that of Italy is Rome."


def table(start: node_pb2.Start, choice: int) -> Sequence[int]:
    """What the nodes say: TEXT over and over, each choice from another token on."""
    ids = byte_level().encode(TEXT * 8).ids
    return ids[choice : choice + start.sampling.max_tokens]


def text_of(max_tokens: int, choice: int = 0) -> str:
    """What `table` spells."""
    tokenizer = byte_level()
    text: str = tokenizer.decode(tokenizer.encode(TEXT * 8).ids[choice : choice + max_tokens])
    return text


@contextlib.asynccontextmanager
async def answering_router(folder: Path, **config: Any) -> AsyncIterator[Harness]:
    """Serves until the block ends; asserts that nothing of any request is left then."""
    async with running_router(write_model_folder(folder), **config) as router:
        prefill, decode = await router.pair()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(node.serve(table)) for node in (prefill, decode)]
            try:
                yield router
                await router.assert_idle()
            finally:
                for task in tasks:
                    task.cancel()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came over the socket."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream: each event's JSON; the last is the string [DONE]."""
        *events, rest = self.body.split(b"\n\n")
        assert rest == b""
        assert all(event.startswith(b"data: ") for event in events)
        said = [event.removeprefix(b"data: ") for event in events]
        return [event.decode() if event == b"[DONE]" else json.loads(event) for event in said]


async def call(
    router: Harness,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: Sequence[tuple[str, str]] = (),
    chunked: bool = False,
) -> Reply:
    """One call on a connection of its own, by hand. `body`: bytes go as they are, anything else as JSON."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    host, port = router.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head(method or ("GET" if body is None else "POST"), path, payload, headers, chunked=chunked))
        if chunked and payload:
            payload = b"%x\r\n%b\r\n" % (len(payload), payload)
        writer.write(payload + b"0\r\n\r\n" if chunked else payload)
        return await read_reply(reader)
    finally:
        writer.close()


def head(
    method: str, path: str, payload: bytes, headers: Sequence[tuple[str, str]] = (), *, chunked: bool = False
) -> bytes:
    """A request's first lines."""
    length = ("transfer-encoding", "chunked") if chunked else ("content-length", str(len(payload)))
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (length, *headers)]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """An answer to its end, which is the connection's."""
    async with asyncio.timeout(20):
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        rest = await reader.read()
    if headers.get("transfer-encoding") == "chunked":
        rest = _unchunked(rest)
    return Reply(status, headers, rest)


def _unchunked(rest: bytes) -> bytes:
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(pieces)
