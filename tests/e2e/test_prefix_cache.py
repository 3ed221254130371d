"""The prefix cache as routers use it: real nodes and a real router, in this process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.oracle import Oracle, random_prompt
from support.router_harness import Answer, Harness, running_router, wait_until
from support.served_nodes import Cluster, cluster

from kvrelay.engine.errors import Unavailable
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.router.prefix_index import PromptBlocks

BLOCK = 16
PREFIX = random_prompt(6 * BLOCK)
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def ending(i: int) -> list[int]:
    """One of many endings, a block long, that differ in their first token."""
    return [i, *random_prompt(BLOCK - 1, seed=i)]


def check_usage(cluster: Cluster, answers: list[Answer]) -> None:
    """What clients were told is what the prefill nodes found."""
    told = sum(answer.last.usage.cached_tokens for answer in answers)
    assert told == sum(node.snapshot.num_prefix_hits for node in cluster.prefills)


@pytest.fixture
def info(tiny_model: Path) -> ModelInfo:
    return read_model_info(tiny_model)


@pytest.fixture
async def router(info: ModelInfo) -> AsyncIterator[Harness]:
    async with running_router(info) as harness:
        yield harness


@pytest.fixture
async def four(router: Harness, tiny_model: Path, info: ModelInfo) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes."""
    async with cluster(router, tiny_model, info, prefill=2, decode=2) as nodes:
        yield nodes


async def run(cluster: Cluster, prompt: list[int], **more: object) -> Answer:
    """A request that has the cluster to itself, and the router knows what it left."""
    answer = await cluster.router.generate(prompt, sampling=GREEDY, **more)
    await cluster.quiet()
    return answer


async def test_requests_with_a_shared_prefix_follow_it_to_the_nodes_that_have_it(
    four: Cluster, tiny_oracle: Oracle
) -> None:
    answers = [await run(four, [*PREFIX, *ending(i)]) for i in range(5)]
    first = answers[0].last.handoff
    assert [answer.last.usage.cached_tokens for answer in answers] == [0, *[len(PREFIX)] * 4]
    for i, answer in enumerate(answers):
        assert answer.token_ids == tiny_oracle.generate([*PREFIX, *ending(i)], max_tokens=4, ignore_eos=True)
        handoff = answer.last.handoff
        assert (handoff.prefill_node, handoff.decode_node) == (first.prefill_node, first.decode_node)
        assert handoff.cached_blocks == (6 if i else 0)
    other = await run(four, random_prompt(7 * BLOCK, seed=99))
    assert other.last.handoff.prefill_node != first.prefill_node  # of two that lack it, the one less used
    assert other.last.handoff.decode_node != first.decode_node
    check_usage(four, [*answers, other])


async def test_a_prefix_is_followed_until_its_node_is_busier_than_the_cache_saves(
    four: Cluster, tiny_oracle: Oracle
) -> None:
    answers = [await run(four, [*PREFIX, *ending(0)])]
    warm = next(node for node in four.prefills if node.name == answers[0].last.handoff.prefill_node)
    cold = next(node for node in four.prefills if node is not warm)
    tasks: list[asyncio.Task[Answer]] = []
    with warm.standing_still():
        while four.seen(cold).num_placed == 0:
            assert len(tasks) < 100
            tasks.append(asyncio.create_task(four.router.generate([*PREFIX, *ending(1 + len(tasks))], sampling=GREEDY)))
            await wait_until(lambda: four.router.server.statistics().num_running == len(tasks))
    assert len(tasks) > 6  # each leaves one block to compute, and the other node would have seven
    answers += await asyncio.gather(*tasks)
    await four.quiet()
    assert {answer.last.handoff.prefill_node for answer in answers[:7]} == {warm.name}
    assert answers[-1].last.handoff.prefill_node == cold.name
    assert answers[-1].last.usage.cached_tokens == 0
    assert answers[-1].token_ids == tiny_oracle.generate([*PREFIX, *ending(len(tasks))], max_tokens=4, ignore_eos=True)
    check_usage(four, answers)


async def test_another_cache_salt_finds_nothing_for_the_nodes_and_for_the_router(
    router: Harness, tiny_model: Path, info: ModelInfo
) -> None:
    async with cluster(router, tiny_model, info) as pair:
        for salt in ("", "mine", "theirs"):
            blocks = PromptBlocks(PREFIX, salt)
            for cached, found in ((0, 0), (len(PREFIX) - BLOCK, 6)):
                assert {pair.seen(node).prefixes.num_cached_blocks(blocks.names(BLOCK)) for node in pair.nodes} == {
                    found
                }
                answer = await run(pair, PREFIX, cache_salt=salt)
                assert (answer.last.usage.cached_tokens, answer.last.handoff.cached_blocks) == (cached, found)


async def test_what_was_evicted_is_gone_for_the_router_too(router: Harness, tiny_model: Path, info: ModelInfo) -> None:
    async with cluster(router, tiny_model, info, num_blocks=10) as pair:
        (node,) = pair.prefills
        await run(pair, PREFIX)
        index = pair.seen(node).prefixes
        assert index.num_cached_blocks(PromptBlocks(PREFIX).names(BLOCK)) == 6
        await run(pair, random_prompt(7 * BLOCK, seed=1))
        num_left = index.num_cached_blocks(PromptBlocks(PREFIX).names(BLOCK))
        assert 0 < num_left < 6  # the end of a prefix goes before its beginning
        again = await run(pair, PREFIX)
        assert again.last.usage.cached_tokens == num_left * BLOCK
        await run(pair, random_prompt(7 * BLOCK, seed=2))
        await run(pair, random_prompt(7 * BLOCK, seed=3))
        assert index.num_cached_blocks(PromptBlocks(PREFIX).names(BLOCK)) == 0
        assert (await run(pair, PREFIX)).last.usage.cached_tokens == 0


@pytest.mark.slow
async def test_a_router_that_comes_later_or_again_knows_all_that_the_nodes_hold(
    router: Harness, tiny_model: Path, info: ModelInfo
) -> None:
    async with running_router(info) as gone:
        address = gone.address  # its port is free again
    async with cluster(router, tiny_model, info, routers=[address]) as pair:
        await run(pair, PREFIX)
        for _ in range(2):  # the second is a restart
            async with running_router(info, port=int(address.rpartition(":")[2])) as second:
                at_second = Cluster(second, pair.prefills, pair.decodes)
                await at_second.quiet()
                assert (await run(at_second, [*PREFIX, 1])).last.usage.cached_tokens == len(PREFIX)
                await run(at_second, random_prompt(5 * BLOCK, seed=7))
                await pair.quiet()  # and the first router hears of what the second had computed
        before = [pair.seen(node) for node in pair.nodes]
        for node in pair.nodes:
            router.server._links[node.epoch].close(Unavailable("a new stream"))
        await wait_until(lambda: not any(seen is old for seen in router.server.registry for old in before))
        await pair.quiet()
        assert (await run(pair, [*PREFIX, 1])).last.usage.cached_tokens == len(PREFIX)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_usage_tells_what_the_cache_held(
    router: Harness, tiny_model: Path, info: ModelInfo, stream: bool, prefill: int, num_choices: int
) -> None:
    """Of the node that computed the prompt: all full blocks but one that holds the last token."""
    sampling = GREEDY | {"n": num_choices}
    async with cluster(router, tiny_model, info, prefill=prefill) as nodes:
        for length, cached in ((40, 0), (40, 32), (32, 16), (33, 32), (47, 32), (60, 32), (60, 48)):
            answer = await router.generate(random_prompt(60)[:length], stream=stream, sampling=sampling)
            usage = answer.responses[-1].usage
            assert (usage.prompt_tokens, usage.cached_tokens) == (length, cached)
            assert usage.completion_tokens == 4 * num_choices
            await nodes.quiet()


async def test_usage_says_that_log_probabilities_of_the_prompt_had_no_use_of_the_cache(
    router: Harness, tiny_model: Path, info: ModelInfo
) -> None:
    """C13."""
    async with cluster(router, tiny_model, info) as pair:
        await run(pair, PREFIX)
        answer = await router.generate(PREFIX, sampling=GREEDY | {"prompt_logprobs": 0})
        assert answer.last.usage.cached_tokens == 0
        assert answer.last.handoff.cached_blocks == 6
