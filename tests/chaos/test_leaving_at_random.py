"""Clients leave whenever it happens, beside fifty that stay, on a pair that is short of everything; and a thousand
leave a router of which nothing may remember them.
"""

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_node import FakeNode, delta
from support.leaving import BACK_S, WAIT_S, Call, Cluster, Leaver, Standing, Way, closing_all, make_request
from support.oracle import Oracle, make_request as make_oracle_request
from support.roles import Client, Roles
from support.router_harness import Harness, running_router
from support.tiny_tokenizers import write_model_folder

from kvrelay.router.live import MAX_LIVES

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

STREAMED = (True, False)
NUM_NEIGHBOURS, NUM_LEAVERS, NUM_AT_ONCE = 50, 100, 8
P_FLAGS = ("--num-blocks", "24", "--max-num-batched-tokens", "32")
MAX_MODEL_LEN = 112  # of D; P has the model's 128
NUM_SEATS = 40
D_FLAGS = ("--num-blocks", "64", "--max-num-seqs", str(NUM_SEATS), "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def roles(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    roles = Roles(tiny_model, tmp_path_factory.mktemp("logs"))
    yield roles
    roles.close()


@pytest.fixture(scope="module")
def processes(roles: Roles) -> Any:
    router = roles.start("router", "--port", "0", "--max-choices", str(NUM_SEATS + 1))
    where = ("--router", router.grpc, "--dtype", "float32", "--threads", "1")
    prefill = roles.start("prefill", *where, *P_FLAGS)
    decode = roles.start("decode", *where, *D_FLAGS, "--max-model-len", str(MAX_MODEL_LEN))
    client = Client(router.grpc)
    client.wait_until_paired()
    client.close()
    return router, prefill, decode


@pytest.fixture
async def cluster(processes: Any) -> AsyncIterator[Cluster]:
    cluster = Cluster(*processes)
    yield cluster
    await cluster.until(Standing().is_all)
    await cluster.close()


class TokenClock:
    """Time as the tokens of those who stay: it goes as fast as the machine."""

    def __init__(self) -> None:
        self._now = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def move(self, num_tokens: int) -> None:
        self._now += num_tokens
        for _, waiter in [entry for entry in self._waiting if entry[0] <= self._now and not entry[1].done()]:
            waiter.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]

    async def wait(self, num_tokens: int) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((self._now + num_tokens, waiter))
        await waiter


@dataclass(frozen=True, slots=True)
class Part:
    """A request, and what it gives when nobody disturbs it."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    expected: list[int]

    def request(self, *, stream: bool = True) -> Any:
        return make_request(self.prompt, stream=stream, **self.sampling)


def draw_parts(rng: random.Random, oracle: Oracle) -> list[Part]:
    """Short and long, greedy and seeded."""
    parts = []
    for i in range(NUM_NEIGHBOURS):
        prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(4, 60)))
        chance = {"temperature": 0.9, "seed": rng.randrange(2**32)} if i % 2 else {}
        parts.append((prompt, {"max_tokens": rng.randrange(15, 50)} | chance))
    requests = [
        make_oracle_request(prompt, str(i), ignore_eos=True, **sampling) for i, (prompt, sampling) in enumerate(parts)
    ]
    return [Part(*part, tokens) for part, tokens in zip(parts, oracle.generate_all(requests), strict=True)]


async def stay(cluster: Cluster, part: Part, clock: TokenClock, over: asyncio.Event) -> int:
    """Ask again and again until it is over. Returns: how often."""
    num_ended = 0
    while not num_ended or not over.is_set():
        call = Call(cluster.channel, part.request())
        call.on_tokens = clock.move
        assert await call.ended() is grpc.StatusCode.OK, call.details
        assert call.tokens == part.expected
        num_ended += 1
    return num_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Whim:
    """One client that leaves, when one of these has come about: whichever its way goes by."""

    part: Part
    way: Way
    stream: bool
    num_own_tokens: int  # 0: by those of the others
    num_tokens: int
    after_s: float


def draw_whim(rng: random.Random, parts: Sequence[Part]) -> Whim:
    part, stream = rng.choice(parts), rng.choice(STREAMED)
    return Whim(
        part=part,
        way=rng.choice(list(Way)),
        stream=stream,
        num_own_tokens=rng.randrange(len(part.expected)) if stream and rng.random() < 0.5 else 0,
        num_tokens=int(10 ** rng.uniform(0, 3.5)),
        after_s=10 ** rng.uniform(-2, 0.3),
    )


async def leave(cluster: Cluster, whim: Whim, clock: TokenClock) -> Leaver:
    async with closing_all() as calls:
        call = Leaver(whim.way, await cluster.dial(), whim.part.request(stream=whim.stream), whim.after_s)
        calls.append(call)
        if not whim.way.by_clock:
            await (call.has_tokens(whim.num_own_tokens) if whim.num_own_tokens else clock.wait(whim.num_tokens))
        code = await call.leave()
    assert code in (whim.way.code, grpc.StatusCode.OK), (whim.way, code, call.details)
    assert call.tokens == whim.part.expected[: len(call.tokens)]
    return call


async def test_a_hundred_who_leave_at_random_change_nothing_for_fifty_who_stay(
    cluster: Cluster, tiny_oracle: Oracle
) -> None:
    """B07. KVRELAY_SEED repeats a run."""
    seed = int(os.environ.get("KVRELAY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"KVRELAY_SEED={seed}")
    rng = random.Random(seed)
    parts = await asyncio.to_thread(draw_parts, rng, tiny_oracle)
    whims = iter([draw_whim(rng, parts) for _ in range(NUM_LEAVERS)])
    clock, over = TokenClock(), asyncio.Event()

    async def leave_one_by_one() -> list[Leaver]:
        return [await leave(cluster, whim, clock) for whim in whims]

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        staying = [group.create_task(stay(cluster, part, clock, over)) for part in parts]
        leaving = [group.create_task(leave_one_by_one()) for _ in range(NUM_AT_ONCE)]
        await asyncio.wait(leaving)
        over.set()
    await cluster.until(Standing().is_all, within_s=BACK_S)
    left = [call for task in leaving for call in task.result()]
    with_tokens = Counter(min(len(call.tokens), 2) for call in left if call.code is not grpc.StatusCode.OK)
    print(f"left with 0, 1, more tokens: {sorted(with_tokens.items())}; stayed: {sum(t.result() for t in staying)}")
    assert len(left) == NUM_LEAVERS
    assert sum(with_tokens.values()) > NUM_LEAVERS // 4, "most came to their end"


async def test_what_the_router_knows_to_be_too_long_for_d_is_refused_before_p_hears_of_it(cluster: Cluster) -> None:
    """A17."""
    before = await cluster.until(Standing().is_all)
    for max_tokens in (33, 20_000):
        call = Call(cluster.channel, make_request(range(80), max_tokens=max_tokens), WAIT_S)
        assert await call.ended() is grpc.StatusCode.INVALID_ARGUMENT, call.details
        assert f"holds {MAX_MODEL_LEN} tokens" in call.details, call.details
    after = await cluster.until(Standing().is_all, within_s=BACK_S)
    assert after.prefill.num_steps == before.prefill.num_steps
    call = Call(cluster.channel, make_request(range(80), max_tokens=32))
    assert await call.ended() is grpc.StatusCode.OK, call.details
    assert len(call.tokens) == 32


async def test_more_choices_than_d_has_seats_are_refused_before_p_hears_of_it(cluster: Cluster) -> None:
    """A17."""
    before = await cluster.until(Standing().is_all)
    call = Call(cluster.channel, make_request(range(40), max_tokens=8, n=NUM_SEATS + 1), WAIT_S)
    assert await call.ended() is grpc.StatusCode.INVALID_ARGUMENT, call.details
    assert f"runs {NUM_SEATS} sequences" in call.details, call.details
    after = await cluster.until(Standing().is_all, within_s=BACK_S)
    assert after.prefill.num_steps == before.prefill.num_steps


# --- a router that forgets -------------------------------------------------------------------------------------------


def tracked_objects() -> Counter[str]:
    """How many objects of the router and of the engine's words there are, by type."""
    gc.collect()
    names = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())
    return Counter(name for name in names if name.startswith(("kvrelay.router", "kvrelay.engine")))


async def come_and_go(router: Harness, prefill: FakeNode, decode: FakeNode, count: int, *, stream: bool) -> None:
    """So many requests, each cancelled when its first token has come."""
    request = make_request("Where is Rome?", max_tokens=8, stream=stream)
    calls = [Call(router.channel, request) for _ in range(count)]
    starts = [await prefill.next_start() for _ in calls]
    assert [(await decode.next_start()).request_id for _ in calls] == [start.request_id for start in starts]
    await prefill.say(*(delta(start, [70], ended=True) for start in starts))
    for call in calls:
        if stream:
            await call.has_tokens(1)
        call.cancel()
    for _ in calls:
        await decode.next_cancel()
    assert {await call.ended() for call in calls} == {grpc.StatusCode.CANCELLED}
    await router.assert_idle()


@pytest.mark.parametrize("stream", STREAMED)
async def test_a_thousand_who_leave_after_their_first_token_leave_no_object(tmp_path: Path, stream: bool) -> None:
    """D02."""
    async with running_router(write_model_folder(tmp_path)) as router:
        prefill, decode = await router.pair()
        for _ in range(3):  # until what is kept of those that ended last is full
            await come_and_go(router, prefill, decode, 100, stream=stream)
        assert router.server.statistics().num_left > MAX_LIVES
        before = tracked_objects()
        for _ in range(7):
            await come_and_go(router, prefill, decode, 100, stream=stream)
        assert router.server.statistics().num_left == 1000
        assert tracked_objects() == before
