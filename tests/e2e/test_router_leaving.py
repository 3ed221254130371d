"""Every way to leave: the client, the clock, the router. Both legs hear of it, and nothing stays behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import write_model_folder

from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc, node_pb2

MOMENTS = ["started", "first token", "decoding", "first token from the decode node only"]


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path)) as harness:
        yield harness


async def bring_to(moment: str, prefill: FakeNode, on_p: node_pb2.Start, decode: FakeNode, on_d: node_pb2.Start) -> int:
    """Returns: how many tokens the client gets by then."""
    match moment:
        case "started":
            return 0
        case "first token":
            await prefill.say(delta(on_p, [70]))
            return 1
        case "decoding":
            await prefill.say(delta(on_p, [70], ended=True))
            await decode.say(delta(on_d, [70, 71, 72]))
            return 3
        case _:
            await decode.say(delta(on_d, [70]))
            return 1


@pytest.mark.parametrize("way", ["cancel", "disconnect", "deadline", "timeout_s"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves_at_any_moment_ends_both_legs(router: Harness, moment: str, way: str) -> None:
    """B07, D02."""
    prefill, decode = await router.pair()
    channel = grpc.aio.insecure_channel(router.address)
    request = pb.GenerateRequest(text="Where is Rome?", sampling=pb.SamplingParams(max_tokens=20))
    if way == "timeout_s":
        request.timeout_s = 0.3
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=0.3 if way == "deadline" else 20)
    on_p, on_d = await prefill.next_start(), await decode.next_start()
    num_tokens = await bring_to(moment, prefill, on_p, decode, on_d)
    got = 0
    while got < num_tokens:
        got += len((await call.read()).token_ids)
    if way == "cancel":
        call.cancel()
    elif way == "disconnect":
        await channel.close()
    else:
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await decode.next_cancel()).request_id == on_d.request_id
    if moment != "decoding":  # there the prefill leg had ended
        assert (await prefill.next_cancel()).request_id == on_p.request_id
    await router.assert_idle()
    assert prefill.cancels.empty()
    await channel.close()


async def test_a_client_that_reads_nothing_is_ended_by_its_deadline(router: Harness) -> None:
    decode = await router.node(DECODE, "D")
    call = router.call(timeout_s=0.3, timeout=None)
    await decode.next_start()
    await decode.next_cancel()
    await router.assert_idle()
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_thousand_requests_that_come_and_go_leave_nothing(router: Harness) -> None:
    """D02."""
    _, decode = await router.pair()
    for _ in range(10):
        calls = [router.call() for _ in range(100)]
        for _ in calls:
            await decode.next_start()
        for call in calls:
            call.cancel()
        for _ in calls:
            await decode.next_cancel()
    await router.assert_idle()
    assert router.server.statistics().num_left == 1000


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["started", "first token", "decoding"])
async def test_a_node_that_dies_fails_what_needs_it_and_cancels_the_other(
    router: Harness, moment: str, victim: str
) -> None:
    """A prefill node whose first token is out is not missed."""
    prefill, decode = await router.pair()
    task = asyncio.create_task(router.generate())
    on_p, on_d = await prefill.next_start(), await decode.next_start()
    await bring_to(moment, prefill, on_p, decode, on_d)
    await wait_until(lambda: router.server.num_requests == 1)
    dying, other = (prefill, decode) if victim == "prefill" else (decode, prefill)
    dying.die()
    await wait_until(lambda: dying.epoch not in {node.facts.epoch for node in router.server.registry})
    if victim == "prefill" and moment != "started":
        await decode.say(delta(on_d, [70, 71, 72]), delta(on_d, [73], first=3, finish="length", ended=True))
        assert (await task).token_ids == [70, 71, 72, 73]
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await task
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"{victim} node" in (caught.value.details() or "")
    if not (victim == "decode" and moment == "decoding"):  # there the prefill leg had ended
        await other.next_cancel()


async def test_a_router_that_drains_lets_requests_end_and_takes_none(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        decode = await router.node(DECODE, "D")
        task = asyncio.create_task(router.generate())
        start = await decode.next_start()
        stopping = asyncio.create_task(router.server.stop(drain_timeout_s=10))
        await wait_until(lambda: router.server.draining)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await router.generate()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await decode.say(delta(start, [70], finish="length", ended=True))
        assert (await task).token_ids == [70]
        await stopping
        await asyncio.wait_for(decode.ended.wait(), 10)


async def test_a_drain_that_takes_too_long_ends_with_an_error_for_each_request(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path)) as router:
        decode = await router.node(DECODE, "D")
        task = asyncio.create_task(router.generate())
        await decode.next_start()
        await router.server.stop(drain_timeout_s=0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
