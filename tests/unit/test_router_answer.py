"""How a gRPC call ends, by a server and a client of gRPC's own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvrelay.router.answer import AnswerCalls, begin_answer, ending_after

PATIENCE_S = 10.0


async def codes(answer: Callable[[Any, Any], Awaitable[None]], num_calls: int) -> set[grpc.StatusCode]:
    """How so many calls at once end."""
    server = grpc.aio.server(interceptors=[AnswerCalls()])
    method = grpc.unary_stream_rpc_method_handler(answer, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Answer": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [channel.unary_stream("/test/Answer")(b"") for _ in range(num_calls)]
            async with asyncio.timeout(PATIENCE_S):
                return set(await asyncio.gather(*map(_end, calls)))
    finally:
        await server.stop(0)


async def _end(call: Any) -> grpc.StatusCode:
    """Read it to its end, which comes behind all messages."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_call_whose_time_is_up_in_the_middle_of_its_first_write_still_gets_its_status() -> None:
    """Without its headers sent before, gRPC would send none, and the client would wait for ever."""

    async def answer(request: bytes, context: Any) -> None:
        async with ending_after(0):  # ends whatever waits first: the headers, then a message
            await begin_answer(context)
            while True:
                await context.write(b"token")

    assert await codes(answer, 50) == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_a_call_whose_time_is_up_between_headers_and_messages_still_gets_its_status() -> None:
    async def answer(request: bytes, context: Any) -> None:
        await begin_answer(context)
        async with ending_after(0):
            while True:
                await context.write(b"token")

    assert await codes(answer, 50) == {grpc.StatusCode.DEADLINE_EXCEEDED}
