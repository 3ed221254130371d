"""An HTTP client that leaves, at any moment and in any way: both legs hear of it, and nothing stays behind."""

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_node import FakeNode, delta
from support.http_router import answering_router, call, head
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import write_model_folder

from kvrelay.proto import node_pb2
from kvrelay.router.http.call import Call

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where is Rome?"}]


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path)) as harness:
        yield harness


async def bring_to(moment: str, prefill: FakeNode, on_p: node_pb2.Start, decode: FakeNode, on_d: node_pb2.Start) -> int:
    """Returns: how many tokens the client gets by then."""
    if moment == "started":
        return 0
    await prefill.say(delta(on_p, [70], ended=True))
    if moment == "first token":
        return 1
    await decode.say(delta(on_d, [70, 71, 72]))
    return 3


async def connect(router: Harness, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    writer.write(head("POST", CHAT, payload) + payload)
    return reader, writer


def leave(writer: asyncio.StreamWriter, way: str) -> None:
    if way == "reset":
        sock = writer.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("moment", ["started", "first token", "decoding"])
async def test_whoever_leaves_at_any_moment_ends_both_legs(
    router: Harness, moment: str, way: str, stream: bool
) -> None:
    """D02, B07."""
    prefill, decode = await router.pair()
    reader, writer = await connect(router, {"messages": MESSAGES, "max_tokens": 20, "n": 1, "stream": stream})
    on_p, on_d = await prefill.next_start(), await decode.next_start()
    num_tokens = await bring_to(moment, prefill, on_p, decode, on_d)
    if stream and num_tokens:
        await reader.readuntil(b'"delta":{"content"')
    leave(writer, way)
    assert (await decode.next_cancel()).request_id == on_d.request_id
    if moment == "started":
        assert (await prefill.next_cancel()).request_id == on_p.request_id
    await router.assert_idle()


async def test_who_leaves_while_the_body_is_read_or_another_waits_leaves_nothing(router: Harness) -> None:
    """D02."""
    host, port = router.http_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head("POST", CHAT, b"x" * 1000) + b'{"messages"')
    await writer.drain()
    writer.transport.abort()
    await router.assert_idle()
    assert (await call(router, "/v1/models")).status == 200


async def test_one_of_several_prompts_that_fails_ends_the_others(router: Harness) -> None:
    _, decode = await router.pair()
    asked = {"prompt": ["Where?", "Why?"], "max_tokens": 5}
    task = asyncio.create_task(call(router, "/v1/completions", asked))
    starts = [await decode.next_start() for _ in range(2)]
    failure = node_pb2.Error(code="INTERNAL", message="broke")
    await decode.say(node_pb2.Delta(request_id=starts[0].request_id, error=failure, ended=True))
    reply = await task
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    cancelled = await decode.next_cancel()
    assert cancelled.request_id == starts[1].request_id
    await router.assert_idle()


async def test_an_error_in_mid_stream_is_its_last_event(router: Harness) -> None:
    prefill, decode = await router.pair()
    task = asyncio.create_task(call(router, CHAT, {"messages": MESSAGES, "max_tokens": 5, "stream": True}))
    on_p, on_d = await prefill.next_start(), await decode.next_start()
    await prefill.say(delta(on_p, [70], ended=True))
    await wait_until(lambda: router.server.num_waiting == 0)
    decode.die()
    events = (await task).events
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["code"] == "unavailable"
    assert "[DONE]" not in events
    assert on_d.request_id


async def test_a_router_that_stops_lets_streams_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        prefill, decode = await router.pair()
        task = asyncio.create_task(call(router, CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True}))
        on_p, on_d = await prefill.next_start(), await decode.next_start()
        await prefill.say(delta(on_p, [70], ended=True))
        await wait_until(lambda: router.server.num_waiting == 0)
        stopping = asyncio.create_task(router.server.stop(10))
        await wait_until(lambda: router.server.draining)
        assert (await call(router, CHAT, {"messages": MESSAGES})).status == 503
        assert (await call(router, "/health")).status == 503
        await decode.say(delta(on_d, [70, 71], finish="length", ended=True))
        assert (await task).events[-1] == "[DONE]"
        await stopping


async def test_a_hundred_who_leave_leave_no_object(tmp_path: Path) -> None:
    """D02."""
    async with answering_router(tmp_path) as router:

        async def ask_and_leave(index: int) -> None:
            asked = {"messages": MESSAGES, "max_tokens": 100, "stream": bool(index % 2)}
            _, writer = await connect(router, asked)
            for _ in range(index % 70):
                await asyncio.sleep(0)
            leave(writer, "close")

        for start in range(0, 100, 20):
            await asyncio.gather(*(ask_and_leave(index) for index in range(start, start + 20)))
        await router.assert_idle()
        await wait_until(lambda: not any(type(thing) is Call for thing in gc.get_objects()))
