"""Every way to leave: the client, the clock, the router. Both legs hear of it, and nothing stays behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta, prompt_deltas
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import byte_level, write_model_folder

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
            await prefill.say(*prompt_deltas(on_p), delta(on_p, [70]))
            return 1
        case "decoding":
            await prefill.say(*prompt_deltas(on_p), delta(on_p, [70], ended=True))
            await decode.say(delta(on_d, [70, 71, 72]))
            return 3
        case _:
            await decode.say(delta(on_d, [70]))
            return 0 if on_d.sampling.HasField("prompt_logprobs") else 1  # held back until those are there


async def wait_heard(router: Harness, node: FakeNode) -> None:
    """Until the router has taken in all that this node has said."""
    await node.say_load(num_free_blocks=999, sessions=node.load.sessions)
    known = {known.facts.epoch: known for known in router.server.registry}
    await wait_until(lambda: known[node.epoch].load.num_free_blocks == 999)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["cancel", "disconnect", "deadline", "timeout_s"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves_at_any_moment_ends_both_legs(
    router: Harness, moment: str, way: str, stream: bool
) -> None:
    """B07, D02: streamed or not."""
    prefill, decode = await router.pair()
    channel = grpc.aio.insecure_channel(router.address)
    sampling = pb.SamplingParams(max_tokens=20, n=2, prompt_logprobs=1)
    request = pb.GenerateRequest(text="Where is Rome?", sampling=sampling, stream=stream)
    if way == "timeout_s":
        request.timeout_s = 0.3
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=0.3 if way == "deadline" else 20)
    on_p, on_d = await prefill.next_start(), await decode.next_start()
    num_tokens = await bring_to(moment, prefill, on_p, decode, on_d)
    for node in (prefill, decode):
        await wait_heard(router, node)
    got = 0
    while stream and got < num_tokens:
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
    assert router.server.statistics().num_left == 1
    await channel.close()


async def test_a_client_that_leaves_when_some_choices_have_ended_ends_the_others(router: Harness) -> None:
    """B07: one has ended by itself, one by its stop string."""
    decode = await router.node(DECODE, "D")
    z = byte_level().token_to_id("z")
    call = router.call(sampling={"max_tokens": 9, "n": 3, "stop": ["z"]})
    start = await decode.next_start()
    await decode.say(
        delta(start, [70], finish="stop"), delta(start, [71, z], choice=1), delta(start, [72, 73], choice=2)
    )
    for _ in range(3):
        await call.read()
    assert (await decode.next_cancel()).choice == 1
    call.cancel()
    assert not (await decode.next_cancel()).HasField("choice")
    await router.assert_idle()
    assert router.server.statistics().num_left == 1


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
