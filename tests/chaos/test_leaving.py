"""Clients leave at every moment of a request's life, in every way, and nothing of theirs stays behind: real processes,
fifty others beside them whose tokens do not change.

Each moment is forced, never hoped for: a node that is full, or busy, or frozen by SIGSTOP, or has no token of a step to
spare holds the request where it is. And it is seen there, in what the router and the nodes say of themselves.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from support.leaving import Cluster, Missed, Standing, View, Way
from support.leaving_walk import Kind, Neighbours, Walk
from support.oracle import Oracle, make_request as make_oracle_request
from support.roles import Client, Roles
from support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

STREAMED = (True, False)
NUM_NEIGHBOURS = 50
NUM_TOKENS = 240  # of each neighbour: with its prompt, less than a block
# Blocks so large that a request which stays takes exactly one. A model of many layers: its steps leave time to look.
BLOCK_SIZE = 256
NUM_LAYERS = 12
CHUNK = 16  # tokens of one step of P
LONG = 2400  # a prompt that takes P more than a second
NUM_P_BLOCKS = 10  # room for one such prompt
NUM_SPARE = 10  # blocks of D beside the neighbours'
COMMON = ("--dtype", "float32", "--threads", "1", "--block-size", str(BLOCK_SIZE), "--watermark", "0")
P_FLAGS = ("--num-blocks", str(NUM_P_BLOCKS), "--max-num-batched-tokens", str(CHUNK))
# A step of D has as many tokens as there are neighbours: whoever comes after them gets none, unless it ranks higher.
D_FLAGS = ("--num-blocks", str(NUM_NEIGHBOURS + NUM_SPARE), "--max-num-batched-tokens", str(NUM_NEIGHBOURS))
FIRST = {"priority": -100}  # ranks before the neighbours, however long they have been there
# A text that takes most of a second to tokenise, and whose beginning does not show that it is too long.
LONG_TOKEN = "long" * 50
LONG_TEXT = LONG_TOKEN * 500 + "x" * 900_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path / "deep", num_hidden_layers=NUM_LAYERS, max_position_embeddings=4096)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([LONG_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def roles(model: Path, tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(model, tmp_path)
    yield roles
    roles.close()


@pytest.fixture
async def cluster(roles: Roles) -> AsyncIterator[Cluster]:
    router = await asyncio.to_thread(roles.start, "router", "--port", "0")
    where = ("--router", router.grpc, *COMMON)
    prefill, decode = await asyncio.gather(
        asyncio.to_thread(roles.start, "prefill", *where, *P_FLAGS),
        asyncio.to_thread(roles.start, "decode", *where, *D_FLAGS, "--max-num-seqs", "128"),
    )
    client = Client(router.grpc)
    await asyncio.to_thread(client.wait_until_paired)
    client.close()
    cluster = Cluster(router, prefill, decode)
    yield cluster
    await cluster.close()


@pytest.fixture
async def neighbours(cluster: Cluster, model: Path) -> Neighbours:
    """Ten prompts for all of them: what they give is computed here first."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(6)] for _ in range(10)]
    oracle = Oracle(model)
    requests = [
        make_oracle_request(prompt, str(i), max_tokens=NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    expected = await asyncio.to_thread(oracle.generate_all, requests)
    oracle.close()
    return Neighbours(cluster, NUM_NEIGHBOURS, prompts, expected)


def states(view: View) -> tuple[dict[str, int], dict[str, int]]:
    """The transfers on P and on D."""
    return dict(view.prefill.transfers.states), dict(view.decode.transfers.states)


def is_left_by_d(walk: Walk, view: View, num_leavers: int) -> bool:
    """Whether D has done what it can while P, which may still write into shared memory, is frozen."""
    if "shm" in view.decode.transfers.sessions.values():
        return states(view)[1] == {"REVOKED": num_leavers}
    return walk.staying.is_all_of_d(view)


# --- the moments, in the order of a request's life -------------------------------------------------------------------


async def sent_and_not_read_by_the_router(walk: Walk) -> None:
    kinds = [kind for kind in walk.kinds if kind[0] is not Way.TIMEOUT_S]  # a clock that nobody has read yet
    text = "x" * 5000
    with contextlib.ExitStack() as frozen:
        freeze = partial(frozen.enter_context, walk.cluster.frozen("router"))
        async with walk.sent(kinds, text=text, when_dialled=freeze) as leavers:
            await walk.see(leavers, lambda view: all(call.line.wire.num_bytes_up > len(text) for call in leavers))
            await walk.leave(leavers)
    await walk.back()


async def being_tokenised(walk: Walk) -> None:
    async with walk.sent(walk.kinds, text=LONG_TEXT) as leavers:
        number, idle = NUM_NEIGHBOURS + len(leavers), walk.staying
        await walk.see(
            leavers, lambda view: view.num_requests == number and idle.is_all_of_p(view) and idle.is_all_of_d(view)
        )
        await walk.leave(leavers)
        await walk.back()


async def expected_by_d_and_not_read_by_p(walk: Walk) -> None:
    with walk.cluster.frozen("prefill"):
        async with walk.sent(walk.kinds) as leavers:
            await walk.see(leavers, lambda view: states(view)[1] == {"WAITING": len(leavers)})
            await walk.leave(leavers)
            await walk.back(lambda view: walk.staying.is_all_of_router(view) and walk.staying.is_all_of_d(view))
    await walk.back()


async def queued_on_p(walk: Walk) -> None:
    async with walk.staying_on_d(NUM_SPARE), walk.staying_on_p(NUM_P_BLOCKS), walk.sent(walk.kinds) as leavers:
        queued = {"OFFERED": NUM_P_BLOCKS}, {"PENDING": NUM_P_BLOCKS, "WAITING": len(leavers)}
        await walk.see(leavers, lambda view: states(view) == queued and view.prefill.load.num_waiting == len(leavers))
        await walk.leave(leavers)
        await walk.back()


async def in_the_middle_of_a_prompt(walk: Walk, kind: Kind) -> None:
    """D hears nothing: what P has, P itself gives back."""
    before = await walk.cluster.view()
    with walk.cluster.frozen("decode"):
        async with walk.sent([kind], length=LONG, max_tokens=100) as leavers:
            await walk.see(leavers, lambda view: is_in_a_prompt(view) and states(view)[0] == {"OFFERED": 1})
            await walk.leave(leavers)
            after = await walk.back(lambda view: walk.staying.is_all_of_p(view) or is_long_computed(before, view))
    if is_long_computed(before, after):
        raise Missed("the prompt was computed to its end")
    await walk.back()


async def in_the_middle_of_a_transfer(walk: Walk, kind: Kind) -> None:
    before = await walk.cluster.view()

    def do_bytes_flow(view: View) -> bool:
        is_under_way = states(view) == ({"SENDING": 1}, {"GRANTED": 1}) and is_in_a_prompt(view)
        return is_under_way and view.prefill.transfers.num_bytes > before.prefill.transfers.num_bytes

    async with walk.sent([kind], length=LONG, max_tokens=100) as leavers:
        await walk.see(leavers, do_bytes_flow)
        await walk.leave(leavers)
        if is_long_computed(before, await walk.back()):
            raise Missed("the prompt was computed to its end")


def is_in_a_prompt(view: View) -> bool:
    return view.prefill.load.num_running == 1 and 0 < view.prefill.load.num_waiting_tokens < LONG


def is_long_computed(before: View, after: View) -> bool:
    return after.prefill.num_steps - before.prefill.num_steps >= LONG // CHUNK


async def offered_and_not_granted(walk: Walk) -> None:
    async with walk.staying_on_d(NUM_SPARE), walk.sent(walk.kinds) as leavers:
        await walk.see(leavers, replace(walk.staying, num_offered=len(leavers)).is_all, num_tokens=1)
        await walk.leave(leavers)
        await walk.back()


async def granted_and_no_byte_sent(walk: Walk) -> None:
    async with walk.staying_on_d(NUM_SPARE) as landed, walk.sent(walk.kinds) as leavers:
        await walk.see(leavers, replace(walk.staying, num_offered=len(leavers)).is_all, num_tokens=1)
        with walk.cluster.frozen("prefill"):
            await walk.release(landed)
            await walk.see(leavers, lambda view: states(view)[1] == {"GRANTED": len(leavers)})
            await walk.leave(leavers)
            await walk.back(lambda view: walk.staying.is_all_of_router(view) and is_left_by_d(walk, view, len(leavers)))
        await walk.back()


async def committed_and_not_landed(walk: Walk) -> None:
    async with walk.staying_on_d(NUM_SPARE) as landed, walk.sent(walk.kinds) as leavers:
        await walk.see(leavers, replace(walk.staying, num_offered=len(leavers)).is_all, num_tokens=1)
        with contextlib.ExitStack() as frozen:
            with walk.cluster.frozen("prefill"):
                await walk.release(landed)
                await walk.see(leavers, lambda view: states(view)[1] == {"GRANTED": len(leavers)})
                frozen.enter_context(walk.cluster.frozen("decode"))
            await walk.see(leavers, lambda view: states(view)[0] == {"COMMITTED": len(leavers)})
            await walk.leave(leavers)
            await walk.back(walk.staying.is_all_of_router)
        await walk.back()


async def first_token_out_and_nothing_heard_by_d(walk: Walk) -> None:
    """B07: D has not even read that it was called."""
    with walk.cluster.frozen("decode"):
        async with walk.sent(walk.kinds) as leavers:
            await walk.see(leavers, replace(walk.staying, num_offered=len(leavers)).is_all_of_p, num_tokens=1)
            await walk.leave(leavers)
            await walk.back(walk.staying.is_all_of_router)
    await walk.back()


async def landed_and_in_no_step_yet(walk: Walk) -> None:
    async with walk.sent(walk.kinds) as leavers:
        await walk.see(leavers, Standing(NUM_NEIGHBOURS + len(leavers)).is_all, num_tokens=1)
        await walk.leave(leavers)
        await walk.back()
    assert all(len(leaver.tokens) <= 1 for leaver in leavers), "a step of D had it"


async def decoding(walk: Walk) -> None:
    async with walk.sent(walk.kinds, **FIRST) as leavers:
        await walk.see(leavers, Standing(NUM_NEIGHBOURS + len(leavers)).is_all, num_tokens=3)
        num_steps = (await walk.cluster.view()).decode.num_steps
        await walk.see(leavers, lambda view: view.decode.num_steps > num_steps + 1)
        await walk.leave(leavers)
        await walk.back()


def is_one_more_decoding(view: View) -> bool:
    return view.decode.load.num_running > NUM_NEIGHBOURS and not view.decode.transfers.states


async def one_token_before_the_end(walk: Walk, kind: Kind) -> None:
    async with walk.sent([kind], max_tokens=3, **FIRST) as leavers:
        if leavers[0].is_streamed:
            await walk.see(leavers, num_tokens=2)
        else:
            await walk.see(leavers, is_one_more_decoding)
        with walk.cluster.frozen("decode"):
            await walk.leave(leavers, may_end=True)
        await walk.back()


MOMENTS_FOR_ONE = (in_the_middle_of_a_prompt, in_the_middle_of_a_transfer, one_token_before_the_end)
MOMENTS_FOR_ALL = (
    sent_and_not_read_by_the_router,
    expected_by_d_and_not_read_by_p,
    queued_on_p,
    offered_and_not_granted,
    granted_and_no_byte_sent,
    committed_and_not_landed,
    first_token_out_and_nothing_heard_by_d,
    landed_and_in_no_step_yet,
    decoding,
    being_tokenised,  # the last, for it leaves threads at work
)


@pytest.mark.timeout(300)  # beside whatever else the machine does
async def test_whoever_leaves_takes_everything_along_at_every_moment_and_in_every_way(
    cluster: Cluster, neighbours: Neighbours
) -> None:
    """B07, D02."""
    walk = Walk(cluster, neighbours, STREAMED)
    for moment in (*MOMENTS_FOR_ONE, *MOMENTS_FOR_ALL):
        started, walk.longest_s = time.monotonic(), 0.0
        if moment in MOMENTS_FOR_ONE:
            await walk.one_by_one(partial(moment, walk))
        else:
            await walk.pass_through(partial(moment, walk))
        print(f"{moment.__name__}: {time.monotonic() - started:.2f} s, back within {walk.longest_s:.2f} s")
    await neighbours.go()
    await cluster.until(Standing().is_all)
    assert walk.num_left >= len(MOMENTS_FOR_ONE + MOMENTS_FOR_ALL) * len(walk.kinds) - len(STREAMED)
    print(f"{walk.num_left} left, {walk.num_missed} missed, {neighbours.num_ended} stayed to their end")
