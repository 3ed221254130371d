"""One HTTP call, read and answered with as little as can be between it and the socket."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.log import get_logger
from kvrelay.router.http.errors import HttpError, body_of, headers_of, status_of

log = get_logger(__name__)

JSON = b"application/json"
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers what is streamed undoes it
]

Headers = Sequence[tuple[bytes, bytes]]


class ClientLeft(Exception):
    """The connection is gone: nobody is to be told anything."""


@dataclass(slots=True, eq=False)
class Call:
    """A request and the way to answer it."""

    scope: Scope
    receive: Receive
    send: Send
    has_begun: bool = False  # an answer is on its way

    @property
    def headers(self) -> Headers:
        headers: Headers = self.scope["headers"]
        return headers

    def header(self, name: bytes) -> bytes:
        """The first of that name (lower case), or nothing."""
        return next((value for key, value in self.headers if key == name), b"")

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body; one that is said to be too large is not read.

        Raises: HttpError, ClientLeft.
        """
        said = self.header(b"content-length")
        if said and (not said.isdigit() or int(said[:20]) > max_bytes):
            raise _too_large(max_bytes)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > max_bytes:
                        raise _too_large(max_bytes)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise HttpError(408, "timeout", f"the body did not come within {timeout_s:g} s") from None

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels what is inside when the client goes; to be used once the body is read.

        Raises: ClientLeft.
        """
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        async def watch() -> None:
            nonlocal has_left
            while (await self.receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if has_left and task.uncancel() == 0:
                raise ClientLeft from None
            raise
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])

    # --- answers

    async def answer(self, body: bytes, *, status: int = 200, kind: bytes = JSON, headers: Headers = ()) -> None:
        """In one piece."""
        await self._begin(status, [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers])
        await self.send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: object) -> None:
        await self.answer(msgspec.json.encode(value))

    async def stream(self, events: bytes) -> None:
        """Some events of a stream, which is to be ended by `end_stream`."""
        if not self.has_begun:
            await self._begin(200, _EVENTS)
        await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        if not self.has_begun:
            await self._begin(200, _EVENTS)
        await self.send({"type": "http.response.body", "body": events})

    async def fail(self, error: KvrelayError) -> None:
        """Say what went wrong: as the answer's status, or, in the middle of a stream, as its last event."""
        body = body_of(error)
        if self.has_begun:
            await self.end_stream(b"data: %b\n\n" % body)
        else:
            await self.answer(body, status=status_of(error), headers=headers_of(error))

    async def _begin(self, status: int, headers: Headers) -> None:
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


@asynccontextmanager
async def answering(call: Call) -> AsyncIterator[None]:
    """The root of a call: whatever goes wrong inside fails this call, and no other."""
    try:
        yield
    except ClientLeft:
        pass
    except KvrelayError as error:
        await call.fail(error)
    except Exception:
        log.exception("call_failed")
        await call.fail(KvrelayError("internal error; the router's log has it"))


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, "body_too_large", f"the body is larger than {max_bytes} bytes")
