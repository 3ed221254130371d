"""Several choices, log-probabilities and bad words through a real router, with fake nodes; answers streamed and not."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_node import DECODE, FakeNode, delta, logprobs_of, prompt_deltas
from support.router_harness import Answer, Harness, running_router, wait_until
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.proto import inference_pb2 as pb, node_pb2

Start = node_pb2.Start
PROMPT = [70, 71, 72, 73]


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path)) as harness:
        yield harness


def letters(text: str) -> list[int]:
    """A token a letter."""
    return [byte_level().token_to_id(letter) for letter in text]


async def started(router: Harness, **more: Any) -> tuple[asyncio.Task[Answer], FakeNode, Start, FakeNode, Start]:
    """A request whose both legs have been started."""
    prefill, decode = await router.pair()
    task = asyncio.create_task(router.generate(PROMPT, **more))
    return task, prefill, await prefill.next_start(), decode, await decode.next_start()


async def test_nodes_get_every_sampling_field_that_is_theirs_and_no_text(router: Harness) -> None:
    decode = await router.node(DECODE, "D")
    sampling = {"n": 3, "logprobs": 0, "prompt_logprobs": 2, "bad_words": ["a", " a", "  b"], "stop": ["x"]}
    task = asyncio.create_task(router.generate(PROMPT, sampling={"max_tokens": 1} | sampling))
    start = await decode.next_start()
    assert (start.sampling.n, start.sampling.logprobs, start.sampling.prompt_logprobs) == (3, 0, 2)
    assert start.sampling.HasField("logprobs")
    assert (list(start.sampling.bad_words), list(start.sampling.stop), start.choice) == ([], [], 0)
    spelled = [byte_level().encode(text).ids for text in ("a", " a", "b", " b")]
    assert [list(word.ids) for word in start.bad_word_ids] == spelled
    ends = [delta(start, [5], choice=choice, finish="length") for choice in range(3)]
    await decode.say(*prompt_deltas(start), *ends, delta(start, ended=True))
    await task


async def test_a_choice_that_a_stop_string_ends_is_cancelled_alone_and_the_others_go_on(router: Harness) -> None:
    sampling = {"max_tokens": 4, "n": 3, "stop": ["zq"]}
    task, prefill, on_p, decode, on_d = await started(router, sampling=sampling)
    outputs = [letters(text) for text in ("abcd", "zqef", "ghij")]
    for choice, tokens in enumerate(outputs):
        await prefill.say(delta(on_p, tokens[:1], choice=choice))  # its leg has not said that it ended
    await decode.say(*(delta(on_d, tokens[:2], choice=choice) for choice, tokens in enumerate(outputs)))
    for node, start in ((prefill, on_p), (decode, on_d)):
        cancel = await node.next_cancel()
        assert (cancel.request_id, cancel.HasField("choice"), cancel.choice) == (start.request_id, True, 1)
    late = delta(on_d, outputs[1][2:], first=2, choice=1, finish="length")  # was on its way
    first = delta(on_d, outputs[0][2:], first=2, choice=0, finish="length")
    await decode.say(late, first)
    await decode.say(delta(on_d, outputs[2][2:], first=2, choice=2, finish="length", ended=True))
    answer = await task
    assert answer.finish_reasons == {0: "length", 1: "stop", 2: "length"}
    assert [answer.of(choice).text for choice in range(3)] == ["abcd", "", "ghij"]
    assert [answer.of(choice).token_ids for choice in range(3)] == [outputs[0], outputs[1][:2], outputs[2]]
    usage = answer.responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 10)
    assert not (await prefill.next_cancel()).HasField("choice")  # of the whole: it never said that it ended
    assert decode.cancels.empty()
    assert router.server.statistics().num_finished == 1


async def test_the_last_choice_that_a_stop_string_ends_ends_the_request(router: Harness) -> None:
    decode = await router.node(DECODE, "D")
    task = asyncio.create_task(router.generate(PROMPT, sampling={"max_tokens": 8, "n": 2, "stop": ["z"]}))
    start = await decode.next_start()
    await decode.say(delta(start, letters("az"), choice=0), delta(start, letters("bz"), choice=1))
    answer = await task
    assert answer.finish_reasons == {0: "stop", 1: "stop"}
    cancels = [await decode.next_cancel(), await decode.next_cancel()]
    assert [cancel.HasField("choice") for cancel in cancels] == [True, False]
    await router.assert_idle()
    assert decode.cancels.empty()


@pytest.mark.parametrize("prefill_first", [True, False])
async def test_log_probabilities_arrive_exactly_as_the_nodes_say_them(router: Harness, prefill_first: bool) -> None:
    """A15."""
    task, prefill, on_p, decode, on_d = await started(router, sampling={"max_tokens": 4, "logprobs": 2})
    tokens = letters("abcd")
    words = [
        (prefill, [delta(on_p, tokens[:1], ended=True)]),
        (decode, [delta(on_d, tokens[:2]), delta(on_d, tokens[2:], first=2, finish="length", ended=True)]),
    ]
    for node, deltas in words if prefill_first else reversed(words):
        await node.say(*deltas)
    answer = await task
    assert answer.token_ids == tokens
    assert answer.logprobs == logprobs_of(tokens, 2)
    assert all(len(response.logprobs) == len(response.token_ids) for response in answer.responses)
    await router.assert_idle()


async def test_log_probabilities_of_the_prompt_come_before_every_token_however_late_they_are(router: Harness) -> None:
    """A15: the decode leg is done before the prefill leg has said them."""
    task, prefill, on_p, decode, on_d = await started(router, sampling={"max_tokens": 2, "prompt_logprobs": 1})
    await decode.say(delta(on_d, [80, 81], finish="length", ended=True))
    first, second = prompt_deltas(on_p)
    await prefill.say(first)
    await prefill.say(second, delta(on_p, [80], ended=True))
    answer = await task
    assert answer.prompt_logprobs == [pb.Logprobs(), *logprobs_of(PROMPT[1:], 1)]
    assert (answer.token_ids, answer.finish_reasons, answer.logprobs) == ([80, 81], {0: "length"}, [])


async def test_a_prefill_node_that_dies_with_log_probabilities_of_the_prompt_unsaid_fails_the_request(
    router: Harness,
) -> None:
    task, prefill, on_p, decode, on_d = await started(router, sampling={"max_tokens": 4, "prompt_logprobs": 0})
    await prefill.say(prompt_deltas(on_p)[0])
    await decode.say(delta(on_d, [80, 81]))
    prefill.die()
    with pytest.raises(grpc.aio.AioRpcError, match="prefill node P was lost") as caught:
        await task
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not (await decode.next_cancel()).HasField("choice")


@pytest.mark.parametrize(
    "wrong",
    [
        {"choice": 2},
        {"choice": 2**32 - 1},
        {"logprobs": []},
        {"logprobs": logprobs_of([5], 2)},
        {"logprobs": [pb.Logprobs(token_ids=[5, 0])]},
        {"logprobs": [pb.Logprobs(token_ids=range(10**5), logprobs=range(10**5))]},
        {"prompt_logprobs": logprobs_of([71], 1), "first_prompt_index": 1},
        {"prompt_logprobs": logprobs_of(range(1000), 1), "first_prompt_index": 0},
    ],
)
async def test_a_node_that_says_what_does_not_fit_fails_that_request_and_no_other(
    router: Harness, wrong: dict[str, Any]
) -> None:
    decode = await router.node(DECODE, "D")
    sampling = {"max_tokens": 2, "n": 2, "logprobs": 1, "prompt_logprobs": 1}
    task = asyncio.create_task(router.generate(PROMPT, sampling=sampling))
    other = asyncio.create_task(router.generate(PROMPT))
    starts = [await decode.next_start(), await decode.next_start()]
    bad, good = sorted(starts, key=lambda start: start.sampling.n, reverse=True)
    said = delta(bad, [5])
    del said.logprobs[:]
    said.MergeFrom(node_pb2.Delta(**{"logprobs": logprobs_of([5], 1)} | wrong))
    await decode.say(said)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await task
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert len(caught.value.details() or "") < 200
    assert not (await decode.next_cancel()).HasField("choice")
    await decode.say(delta(good, [70], finish="length", ended=True))
    assert (await other).token_ids == [70]


def output_of(start: Start, choice: int) -> list[int]:
    """What the fake nodes say: letters, as many as the request's seed and the choice make of it."""
    rng = random.Random(start.sampling.seed * 31 + choice)
    return letters("".join(rng.choice("abcxyz") for _ in range(rng.randint(1, start.sampling.max_tokens))))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_in_one_piece_is_the_streamed_one_joined(router: Harness, n: int, seed: int) -> None:
    """A14: text, tokens, log-probabilities, ends and usage."""
    prefill, decode = await router.pair()
    sampling = {"max_tokens": 12, "n": n, "seed": seed, "logprobs": 1, "prompt_logprobs": seed % 3, "stop": ["xy", "z"]}
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(node.serve(output_of, per_step=2)) for node in (prefill, decode)]
        streamed = await router.generate(PROMPT, sampling=sampling)
        unset, at_once = await asyncio.gather(
            router.generate(PROMPT, sampling=sampling, stream=True),
            router.generate(PROMPT, sampling=sampling, stream=False),
        )
        for task in serving:
            task.cancel()
    assert len(at_once.responses) == n
    assert at_once.responses[0].prompt_logprobs
    for answer in (unset, at_once):
        assert answer.finish_reasons == streamed.finish_reasons
        assert answer.prompt_logprobs == streamed.prompt_logprobs
        assert answer.responses[-1].usage == streamed.responses[-1].usage
        for choice in range(n):
            one, other = answer.of(choice), streamed.of(choice)
            assert (one.text, one.token_ids, one.logprobs) == (other.text, other.token_ids, other.logprobs)
            assert one.logprobs == logprobs_of(one.token_ids, 1)


async def test_a_decode_node_is_counted_with_every_choice_that_it_was_given(router: Harness) -> None:
    prefill, decode = await router.pair()
    task = asyncio.create_task(router.generate([5] * 40, sampling={"max_tokens": 8, "n": 5}))
    await prefill.next_start()
    await decode.next_start()
    nodes = {node.facts.name: node for node in router.server.registry}
    assert (nodes["D"].placed_now.num_choices, nodes["D"].placed_now.num_blocks) == (5, 2 + 5)
    assert (nodes["P"].placed_now.num_choices, nodes["P"].placed_now.num_tokens) == (1, 40)
    task.cancel()
    await decode.next_cancel()
    await wait_until(lambda: router.server.statistics().num_left == 1)


async def test_one_log_line_says_what_all_choices_took(router: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay")
    decode = await router.node(DECODE, "D")
    task = asyncio.create_task(router.generate(PROMPT, sampling={"max_tokens": 3, "n": 2}, stream=False))
    start = await decode.next_start()
    await decode.say(delta(start, [70, 71, 72], choice=1, finish="length"))
    await decode.say(delta(start, [70], choice=0, finish="stop"), delta(start, ended=True))
    await task
    (record,) = [record for record in caplog.records if record.message == "request_ended"]
    assert record.kvrelay_fields["completion_tokens"] == 4  # type: ignore[attr-defined]
