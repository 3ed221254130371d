"""A router under pressure, with fake nodes: what waits is bounded, and who finds no room is told when to come back."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import write_model_folder

from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc, node_pb2
from kvrelay.router.answer import RETRY_HINT

MAX_WAITING = 2
RETRYING = {
    "methodConfig": [
        {
            "name": [{"service": "kvrelay.v1.Inference"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "60s",  # far too late: only the router's hint brings it back in time
                "maxBackoff": "60s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
            },
        }
    ]
}


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path), max_waiting=MAX_WAITING) as harness:
        yield harness


async def refusal(router: Harness, **more: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(**more)
    return caught.value


async def assert_full(router: Harness) -> None:
    error = await refusal(router)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "wait for their first token already; try again in 0." in (error.details() or "")
    assert 100 <= int(dict(error.trailing_metadata())[RETRY_HINT]) < 10_000


async def waiting(router: Harness, node: FakeNode, **more: object) -> tuple["asyncio.Task[object]", node_pb2.Start]:
    task = asyncio.create_task(router.generate(**more))
    return task, await node.next_start()


async def end(node: FakeNode, task: "asyncio.Task[object]", start: node_pb2.Start, *, first: int = 0) -> None:
    await node.say(delta(start, [70], first=first, finish="length", ended=True))
    await task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_place_among_those_that_wait_is_free_with_the_first_token(router: Harness, stream: bool) -> None:
    decode = await router.node(DECODE, "D")
    first, first_start = await waiting(router, decode, stream=stream)
    second, second_start = await waiting(router, decode, stream=stream)
    await assert_full(router)
    await decode.say(delta(first_start, [70]))
    await wait_until(lambda: router.server.num_waiting == 1)
    third, third_start = await waiting(router, decode, stream=stream)
    await assert_full(router)
    await end(decode, first, first_start, first=1)
    await end(decode, second, second_start)
    await end(decode, third, third_start)


async def test_each_decode_node_that_takes_requests_lets_as_many_wait(router: Harness) -> None:
    nodes = [await router.node(DECODE, name) for name in "DE"]
    tasks = [asyncio.create_task(router.generate()) for _ in range(2 * MAX_WAITING)]
    starts = [(node, await node.next_start()) for node in nodes for _ in range(MAX_WAITING)]
    await assert_full(router)
    await nodes[1].say_draining()
    await wait_until(lambda: router.server.registry.num_serving() == 1)
    for node, start in starts[:MAX_WAITING]:
        await node.say(delta(start, [70], finish="length", ended=True))
    await wait_until(lambda: router.server.num_waiting == MAX_WAITING)
    await assert_full(router)  # those on the node that drains still wait
    for node, start in starts[MAX_WAITING:]:
        await node.say(delta(start, [70], finish="length", ended=True))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("how", ["cancel", "deadline", "timeout_s"])
async def test_who_leaves_while_waiting_frees_the_place_at_once(router: Harness, how: str) -> None:
    decode = await router.node(DECODE, "D")
    stays, stays_start = await waiting(router, decode)
    leaving = {"deadline": {"timeout": 0.3}, "timeout_s": {"timeout_s": 0.3}}.get(how, {})
    leaves, leaves_start = await waiting(router, decode, **leaving)
    if how == "cancel":
        leaves.cancel()
    await wait_until(lambda: router.server.num_waiting == 1)
    await asyncio.wait([leaves])
    assert (await decode.next_cancel()).request_id == leaves_start.request_id
    comes, comes_start = await waiting(router, decode)
    await end(decode, comes, comes_start)
    await end(decode, stays, stays_start)


async def test_a_client_that_obeys_the_hint_is_served(router: Harness) -> None:
    """gRPC's own retries, as any client can have them."""
    decode = await router.node(DECODE, "D")
    before = [await waiting(router, decode) for _ in range(MAX_WAITING)]
    options = [("grpc.service_config", json.dumps(RETRYING)), ("grpc.enable_retries", 1)]
    async with grpc.aio.insecure_channel(router.address, options=options) as channel:
        request = pb.GenerateRequest(text="Where is Rome?", sampling=pb.SamplingParams(max_tokens=8))
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=30)
        reading = asyncio.create_task(_read(call))
        await wait_until(lambda: router.server.num_refused > 0)
        for task, start in before:
            await end(decode, task, start)
        await decode.say(delta(await decode.next_start(), [71], finish="length", ended=True))
        assert await reading == [71]


async def _read(call: grpc.aio.UnaryStreamCall) -> list[int]:
    return [token_id async for response in call for token_id in response.token_ids]


@pytest.mark.parametrize(
    ("n", "max_num_seqs", "num_blocks", "words"),
    [
        (9, (8, 4), (1000, 1000), ["n = 9", "9 sequences", "runs 8 sequences at once"]),
        (9, (64, 64), (10, 9), ["n = 9", "11 KV blocks", "has 10 blocks"]),
    ],
)
async def test_more_choices_than_any_decode_node_can_run_are_refused_before_any_node_hears_of_it(
    router: Harness, n: int, max_num_seqs: tuple[int, int], num_blocks: tuple[int, int], words: list[str]
) -> None:
    """A17."""
    nodes = [
        await router.node(DECODE, name, max_num_seqs=seats, num_blocks=blocks)
        for name, seats, blocks in zip("DE", max_num_seqs, num_blocks, strict=True)
    ]
    error = await refusal(router, prompt=[70] * 33, sampling={"max_tokens": 8, "n": n})
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in (error.details() or "")
    assert all(node.starts.empty() for node in nodes)
    assert router.server.num_waiting == 0


async def test_choices_go_to_the_decode_node_that_can_run_them(router: Harness) -> None:
    small = await router.node(DECODE, "small", max_num_seqs=2)
    large = await router.node(DECODE, "large", max_num_seqs=3)
    await large.say_load(num_running=50)  # small would be the better one, if it could
    await wait_until(lambda: any(node.load.num_running == 50 for node in router.server.registry))
    task, start = await waiting(router, large, sampling={"max_tokens": 8, "n": 3})
    await large.say(*(delta(start, [70], choice=i, finish="length") for i in range(3)), delta(start, ended=True))
    await task
    assert small.starts.empty()
