"""The least that a router of streams could do: at each step write one prepared message to each, and nothing else.

Serves from a process of its own; router_cost.py puts what it costs beside what the router does.
"""

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kvrelay.proto import inference_pb2 as pb

NUM_MESSAGES = 256
_MESSAGE = pb.GenerateResponse(text=" relay", token_ids=[504], first_token_index=10).SerializeToString()
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,"model":"smollm2",'
    b'"system_fingerprint":"kvrelay-0.1.0-01234567","choices":[{"index":0,"text":" relay","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)


class Steps:
    """Ticks for whoever waits."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            done, self._next = self._next, asyncio.Event()
            done.set()

    async def wait(self) -> None:
        await self._next.wait()


def serve(edge: str, step_s: float, port: Connection) -> None:
    """Until killed. Sends its port."""
    asyncio.run(_serve(edge, step_s, port))


async def _serve(edge: str, step_s: float, port: Connection) -> None:
    steps = Steps(step_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(steps.run())
        port.send(await (_serve_grpc(steps) if edge == "grpc" else _serve_http(steps)))


async def _serve_grpc(steps: Steps) -> int:
    async def answer(body: bytes, context: Any) -> None:
        for _ in range(NUM_MESSAGES):
            await steps.wait()
            await context.write(_MESSAGE)

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_stream_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _KEPT.append(server)
    return port


async def _serve_http(steps: Steps) -> int:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(NUM_MESSAGES):
            await steps.wait()
            writer.write(_CHUNK)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    _KEPT.append(server)
    port: int = server.sockets[0].getsockname()[1]
    return port


_KEPT: list[Any] = []  # servers, which end with the process


async def read(edge: str, port: int, num_streams: int) -> int:
    """So many streams to their end. Returns: how many messages came."""
    if edge == "http":
        return sum(await asyncio.gather(*(_read_http(port) for _ in range(num_streams))))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one() -> int:
            return len([message async for message in channel.unary_stream("/bare/Stream")(b"")])

        return sum(await asyncio.gather(*(one() for _ in range(num_streams))))


async def _read_http(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    num_events = 0
    async for piece in _pieces(reader):
        num_events += piece.count(b"data: ")
    writer.close()
    return num_events


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(2**16):
        yield piece
