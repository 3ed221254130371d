"""Requests through a real router over loopback gRPC, with fake nodes that say what a test tells them to."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta
from support.router_harness import Answer, Harness, running_router, wait_until
from support.tiny_tokenizers import byte_fallback, byte_level, write_model_folder

from kvrelay.proto import inference_pb2 as pb, node_pb2

Start = node_pb2.Start


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path)) as harness:
        yield harness


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def started(router: Harness, **more: Any) -> tuple[asyncio.Task[Answer], FakeNode, Start, FakeNode, Start]:
    """A request whose both legs have been started."""
    prefill, decode = await router.pair()
    task = asyncio.create_task(router.generate(**more))
    return task, prefill, await prefill.next_start(), decode, await decode.next_start()


def open_legs(router: Harness, node: FakeNode) -> set[str]:
    """Requests that have a leg on this node which has not ended."""
    entries = router.server._dispatcher._entries
    return {key.request_id for key, entry in entries.items() if node.epoch in entry.race.open_legs}


async def test_both_legs_run_one_request(router: Harness) -> None:
    text = " the capital of France"
    output = ids(text)
    task, prefill, on_p, decode, on_d = await started(
        router,
        request_id="mine",
        priority=-2,
        cache_salt="salt",
        trace=pb.TraceContext(traceparent=f"00-{'1' * 32}-{'2' * 16}-01", tracestate="a=1"),
        sampling={"max_tokens": len(output), "seed": 5, "stop": ["never"], "stop_token_ids": [7]},
    )
    assert (on_p.leg, on_p.peer_epoch) == (Start.LEG_PREFILL, decode.epoch)
    assert (on_d.leg, on_d.peer_epoch) == (Start.LEG_DECODE, prefill.epoch)
    assert on_p.request_id == on_d.request_id != "mine"
    assert list(on_p.prompt_token_ids) == ids("Where is Rome?")
    assert (on_p.priority, on_p.cache_salt, on_p.trace.tracestate) == (-2, "salt", "a=1")
    assert (on_p.sampling.seed, list(on_p.sampling.stop), list(on_p.sampling.stop_token_ids)) == (5, [], [7])
    assert 0 < on_p.timeout_s < 11
    first = node_pb2.LegReport(queue_ms=0.01, compute_ms=0.02, num_cached_tokens=3)
    await prefill.say(delta(on_p, output[:1], report=first, ended=True))
    handoff = pb.HandoffReport(kv_bytes=1000, kv_blocks=2, cached_blocks=1, grant_ms=1, transfer_ms=2, transport="zmq")
    second = node_pb2.LegReport(queue_ms=0.03, compute_ms=0.04, handoff=handoff)
    await decode.say(delta(on_d, output[:2], report=second))
    for i in range(2, len(output)):
        is_last = i == len(output) - 1
        await decode.say(delta(on_d, output[i : i + 1], first=i, finish="length" if is_last else "", ended=is_last))
    answer = await task
    assert (answer.text, answer.token_ids) == (text, output)
    last = answer.last
    assert (last.finish_reason, last.request_id) == ("length", "mine")
    assert last.usage == pb.Usage(
        prompt_tokens=len(on_p.prompt_token_ids), completion_tokens=len(output), cached_tokens=3
    )
    handoff.prefill_node, handoff.decode_node = "P", "D"
    assert last.handoff == handoff
    t = last.timings
    assert t.ttft_ms == pytest.approx(t.route_ms + t.prefill_queue_ms + t.prefill_ms + t.first_token_out_ms)
    parts = t.ttft_ms + t.exposed_transfer_ms + t.decode_queue_ms + t.first_decode_step_ms
    if t.exposed_transfer_ms > 0:
        assert t.second_token_ms == pytest.approx(parts)
    else:  # both legs' words came at once: no time is left for what D says that it took
        assert t.second_token_ms <= parts
    assert 0 < t.route_ms < t.ttft_ms <= t.second_token_ms <= t.total_ms
    assert prefill.cancels.empty()
    assert decode.cancels.empty()


@pytest.mark.parametrize("prefill_is_late", [False, True])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_prefill_node_found_is_in_the_answer_in_either_order(
    router: Harness, prefill_is_late: bool, stream: bool
) -> None:
    """The two nodes' streams race each other: the decode node may have told all before the first token comes."""
    output = ids(" the capital of France")
    task, prefill, on_p, decode, on_d = await started(router, stream=stream, sampling={"max_tokens": len(output)})
    first = delta(on_p, output[:1], report=node_pb2.LegReport(compute_ms=0.01, num_cached_tokens=16), ended=True)
    rest = delta(on_d, output, report=node_pb2.LegReport(), finish="length", ended=True)
    if prefill_is_late:
        await decode.say(rest)
        await wait_until(lambda: on_d.request_id not in open_legs(router, decode))
        await prefill.say(first)
    else:
        await prefill.say(first)
        await wait_until(lambda: on_p.request_id not in open_legs(router, prefill))
        await decode.say(rest)
    answer = await task
    assert answer.token_ids == output
    assert (answer.last.usage.cached_tokens, answer.last.finish_reason) == (16, "length")
    assert answer.last.timings.prefill_ms == 0.01
    assert prefill.cancels.empty()


async def test_a_prefill_node_lost_after_the_decode_node_told_all_leaves_the_answer_whole(router: Harness) -> None:
    output = ids(" the capital of France")
    task, prefill, _, decode, on_d = await started(router, sampling={"max_tokens": len(output)})
    await decode.say(delta(on_d, output, finish="length", ended=True))
    await wait_until(lambda: on_d.request_id not in open_legs(router, decode))
    prefill.die()
    answer = await task
    assert (answer.token_ids, answer.last.finish_reason) == (output, "length")


async def test_a_decode_node_alone_runs_the_whole_request(router: Harness) -> None:
    decode = await router.node(DECODE, "D")
    task = asyncio.create_task(router.generate())
    start = await decode.next_start()
    assert (start.leg, start.peer_epoch) == (Start.LEG_WHOLE, "")
    report = node_pb2.LegReport(compute_ms=0.01, num_cached_tokens=1)
    await decode.say(delta(start, ids("ab"), report=report, finish="length", ended=True))
    answer = await task
    assert answer.text == "ab"
    assert answer.last.usage.cached_tokens == 1
    assert not answer.last.HasField("handoff")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
@pytest.mark.parametrize("per_step", [1, 5])
async def test_exactly_max_tokens_come_streamed_by_any_size(router: Harness, max_tokens: int, per_step: int) -> None:
    """A13, A14, D08."""
    prefill, decode = await router.pair()
    output = ids("Where is Rome? In Italy, on the Tiber. naïve café 😀")[:max_tokens]
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(node.serve(lambda *_: output, per_step=per_step)) for node in (prefill, decode)]
        answer = await router.generate(sampling={"max_tokens": max_tokens})
        for task in serving:
            task.cancel()
    assert answer.token_ids == output
    assert answer.text == byte_level().decode(output)
    assert answer.last.usage.completion_tokens == max_tokens
    assert answer.last.finish_reason == "length"


async def test_a_first_token_that_stops_ends_the_request_without_the_decode_node(router: Harness) -> None:
    """A12: and the decode leg, which has not ended, is cancelled."""
    task, prefill, on_p, decode, on_d = await started(router)
    await prefill.say(delta(on_p, [1], finish="stop", ended=True))
    answer = await task
    assert (answer.text, answer.token_ids, answer.last.finish_reason) == ("", [1], "stop")
    assert answer.last.usage.completion_tokens == 1
    assert (await decode.next_cancel()).request_id == on_d.request_id


async def test_a_stop_string_over_two_deltas_ends_both_legs(router: Harness) -> None:
    """A14: nothing of the stop string is shown, and no token behind it counts."""
    task, prefill, on_p, decode, on_d = await started(router, sampling={"max_tokens": 20, "stop": ["zq"]})
    tokens = [byte_level().token_to_id(letter) for letter in "abzqcd"]
    await prefill.say(delta(on_p, tokens[:1]))  # its leg has not said that it ended
    await decode.say(delta(on_d, tokens[:3]))
    await decode.say(delta(on_d, tokens[3:], first=3))
    answer = await task
    assert (answer.text, answer.token_ids, answer.last.finish_reason) == ("ab", tokens[:4], "stop")
    assert answer.last.usage.completion_tokens == 4
    assert (await decode.next_cancel()).request_id == on_d.request_id
    assert (await prefill.next_cancel()).request_id == on_p.request_id


async def test_the_decode_nodes_tokens_may_come_before_the_prefill_nodes(router: Harness) -> None:
    """A14."""
    task, prefill, on_p, decode, on_d = await started(router)
    output = ids("The dog sleeps")
    await decode.say(delta(on_d, output[:3]))
    await wait_until(lambda: router.server.num_requests == 1)
    await prefill.say(delta(on_p, output[:1], ended=True))
    await decode.say(delta(on_d, output[3:], first=3, finish="length", ended=True))
    assert (await task).token_ids == output


async def test_what_comes_late_doubled_or_for_nobody_is_counted_and_changes_nothing(router: Harness) -> None:
    task, prefill, on_p, decode, on_d = await started(router)
    stranger = Start(request_id="nobody", attempt=3)
    other_attempt = Start(request_id=on_d.request_id, attempt=1)
    await decode.say(delta(stranger, [9]), delta(other_attempt, [9], finish="stop", ended=True))
    await prefill.say(delta(on_p, [70], ended=True), delta(on_p, [99], ended=True))
    await decode.say(delta(on_d, [70, 71]), delta(on_d, [70, 71]))
    await decode.say(delta(on_d, [72], first=2, finish="length", ended=True))
    await decode.say(delta(on_d, [73], first=3))
    assert (await task).token_ids == [70, 71, 72]
    await wait_until(lambda: router.server.statistics().num_late_deltas == 4)


async def test_twenty_requests_with_one_client_id_are_twenty_requests(router: Harness) -> None:
    """A09."""
    prefill, decode = await router.pair()

    def output_of(start: Start, choice: int) -> list[int]:
        return [*reversed(start.prompt_token_ids), *start.prompt_token_ids]

    prompts = [[2 + i, 3 + i, 4 + 2 * i] for i in range(20)]
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(node.serve(output_of)) for node in (prefill, decode)]
        calls = [router.generate(prompt, request_id="same", sampling={"max_tokens": 6}) for prompt in prompts]
        answers = await asyncio.gather(*calls)
        for task in serving:
            task.cancel()
    assert [answer.token_ids for answer in answers] == [[*reversed(p), *p] for p in prompts]
    assert {response.request_id for answer in answers for response in answer.responses} == {"same"}


@pytest.mark.parametrize(("retryable", "code"), [(True, "UNAVAILABLE"), (False, "INVALID_ARGUMENT")])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_leg_that_fails_fails_the_request_and_cancels_the_other(
    router: Harness, failing: str, retryable: bool, code: str
) -> None:
    task, prefill, on_p, decode, on_d = await started(router)
    error = node_pb2.Error(code="INVALID_ARGUMENT", message="too long for me", retryable=retryable)
    legs = {"prefill": (prefill, on_p), "decode": (decode, on_d)}
    node, start = legs.pop(failing)
    await node.say(delta(start, error=error, ended=True))
    with pytest.raises(grpc.aio.AioRpcError, match="too long for me") as caught:
        await task
    assert caught.value.code().name == code
    ((other, _),) = legs.values()
    await other.next_cancel()
    assert node.cancels.empty()


async def test_a_decode_nodes_smaller_context_is_the_routers_limit(router: Harness) -> None:
    """A17: refused at once, by its numbers, and no node hears of it."""
    decode = await router.node(DECODE, "D", max_model_len=64)
    assert (await router.stub.GetModel(pb.GetModelRequest())).max_model_len == 64
    error = await failure(router.call([5] * 40, sampling={"max_tokens": 25}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 24" in (error.details() or "")
    task = asyncio.create_task(router.generate([5] * 40, sampling={}))
    start = await decode.next_start()
    assert start.sampling.max_tokens == 24
    await decode.say(delta(start, [70], finish="length", ended=True))
    await task


async def test_without_a_decode_node_a_request_is_unavailable(router: Harness) -> None:
    error = await failure(router.call())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode node" in (error.details() or "")


async def test_beyond_the_limit_a_request_is_refused_with_a_hint_when_to_come_back(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path), max_requests=2) as router:
        decode = await router.node(DECODE, "D")
        running = [asyncio.create_task(router.generate()) for _ in range(2)]
        starts = [await decode.next_start() for _ in running]
        error = await failure(router.call())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) >= 100
        assert "2 requests wait or run already; try again in 0." in (error.details() or "")
        await decode.say(*(delta(start, [70], finish="length", ended=True) for start in starts))
        await asyncio.gather(*running)
        again = asyncio.create_task(router.generate())
        await decode.say(delta(await decode.next_start(), [70], finish="length", ended=True))
        assert (await again).token_ids == [70]


async def test_the_small_calls_answer(router: Harness) -> None:
    stub, text = router.stub, "Where is Rome? 😀"
    model = await stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.max_model_len, list(model.eos_token_ids), model.bos_token_id) == ("tiny", 128, [1], 0)
    tokens = (await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids
    assert list(tokens) == ids(text)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a")])
    assert (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids[0] == 0
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[0, *tokens]))).text == f"<s>{text}"
    skipped = pb.DetokenizeRequest(token_ids=[0, *tokens, 1], skip_special_tokens=True)
    assert (await stub.Detokenize(skipped)).text == text
    for call in (
        stub.Tokenize(pb.TokenizeRequest()),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1])),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[1] * 129)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_chat_is_rendered_by_the_models_template(router: Harness) -> None:
    decode = await router.node(DECODE, "D")
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a")])
    call = router.stub.Generate(pb.GenerateRequest(chat=chat))
    start = await decode.next_start()
    assert byte_level().decode(list(start.prompt_token_ids), skip_special_tokens=False) == "<s>[user]a</s>[assistant]"
    await decode.say(delta(start, [70], finish="length", ended=True))
    assert [response.finish_reason async for response in call] == ["length"]


async def test_a_sentencepiece_like_model_streams_whole_characters(tmp_path: Path) -> None:
    """C02."""
    async with running_router(write_model_folder(tmp_path, byte_fallback())) as router:
        decode = await router.node(DECODE, "D")
        output = byte_fallback().encode("the 😀 é", add_special_tokens=False).ids
        task = asyncio.create_task(router.generate())
        start = await decode.next_start()
        for i, token_id in enumerate(output):
            is_last = i == len(output) - 1
            await decode.say(delta(start, [token_id], first=i, finish="length" if is_last else "", ended=is_last))
        answer = await task
        assert answer.text == " the 😀 é"
        assert all("\ufffd" not in response.text for response in answer.responses)
