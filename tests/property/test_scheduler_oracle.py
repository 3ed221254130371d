"""Random lives of schedulers, each beside a naive one (`support.naive_scheduler`) that must decide the same.

`support.scheduling.World` compares them after every move, and checks what must hold whoever decides.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.scheduling import DecodeWorld, PrefillWorld, World, decode_world, local_world, prefill_world

from kvrelay.engine.errors import TooLarge
from kvrelay.engine.request import Sequence, Status

REPEATED = st.tuples(st.integers(0, 1), st.integers(1, 16)).map(lambda pair: [pair[0]] * pair[1])
PROMPTS = st.one_of(REPEATED, st.tuples(REPEATED, st.lists(st.integers(0, 2), max_size=8)).map(lambda p: p[0] + p[1]))
LIMITS = {
    "num_blocks": st.one_of(st.integers(4, 12), st.integers(4, 40)),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(1, 24),
    "watermark": st.sampled_from([0.0, 0.05, 0.3]),
    "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 5]),
    "priority_ageing_s": st.sampled_from([0.0, 3.0, 60.0]),  # a second between two arrivals
    "prefix_caching": st.booleans(),
}
SWAP = {"num_host_blocks": st.sampled_from([0, 0, 3, 20])}
ARRIVAL = {
    "prompt": PROMPTS,
    "max_tokens": st.integers(1, 20),
    "priority": st.sampled_from([0, 0, 0, 1, 2]),
    "n": st.sampled_from([1, 1, 1, 2, 3]),
    "cache_salt": st.sampled_from(["", "", "other"]),
}
_SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class LocalMachine(RuleBasedStateMachine):
    """Prompts come, run, are cancelled, with pools too small for them."""

    world: World

    @initialize(**LIMITS, **SWAP)
    def start(self, **limits) -> None:
        self.world = local_world(**limits)

    @rule(**ARRIVAL)
    def arrive(self, **arrival) -> None:
        self._arrive(**arrival)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: self.world.live())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.live())))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_all()

    def _arrive(self, **arrival) -> None:
        try:
            self.world.arrive(**arrival)
        except TooLarge:
            pool, num_tokens = self.world.pool, len(arrival["prompt"])
            assert (
                num_tokens + arrival["max_tokens"] > pool.num_blocks * pool.block_size
                or num_tokens // pool.block_size + arrival["n"] > pool.num_blocks
                or arrival["n"] > self.world.scheduler.config.max_num_seqs
            )


class DecodeMachine(LocalMachine):
    """Beside them, prompts whose KV comes from elsewhere: called, offered, granted, landed or not, in any order."""

    @initialize(**LIMITS, **SWAP)
    def start(self, **limits) -> None:
        self.world = decode_world(**limits)

    @rule(**ARRIVAL)
    def expect(self, **arrival) -> None:
        self._arrive(remote=True, **arrival)

    @precondition(lambda self: self.world.expected)
    @rule(data=st.data())
    def offer(self, data) -> None:
        self.world.offer(data.draw(st.sampled_from(self.world.expected)))

    @precondition(lambda self: self.world.remote)
    @rule(data=st.data(), lands=st.sampled_from([True, True, False]))
    def end_transfer(self, data, lands: bool) -> None:
        sequence = data.draw(st.sampled_from(list(self.world.remote)))
        if lands:
            self.world.land(sequence)
        else:
            self.world.fail(sequence)

    @precondition(lambda self: self.world.ended_remote)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.world.end_transfer(data.draw(st.sampled_from(list(self.world.ended_remote))))


class PrefillMachine(LocalMachine):
    """Prompts whose blocks stay pinned for a transfer beyond their end."""

    world: PrefillWorld

    @initialize(**LIMITS)
    def start(self, **limits) -> None:
        self.world = prefill_world(**limits)

    @precondition(lambda self: self._unpinnable())
    @rule(data=st.data())
    def unpin(self, data) -> None:
        self.world.unpin(data.draw(st.sampled_from(self._unpinnable())))

    def _unpinnable(self) -> list[Sequence]:
        return [s for s in self.world.pins if s.status is Status.FINISHED]


@pytest.mark.parametrize("machine", [LocalMachine, DecodeMachine, PrefillMachine])
def test_random_lives_go_as_a_naive_scheduler_says_and_come_to_an_end(machine) -> None:
    """Covers A06, A07, B01, B02, B04, G02, G04, G05."""
    run_state_machine_as_test(machine, settings=_SETTINGS)


def random_arrival(rng: Random) -> dict[str, Any]:
    """As ARRIVAL: prompts that share blocks, or all but their last."""
    prompt = [rng.randrange(2)] * rng.randint(1, 16) + [rng.randrange(3) for _ in range(rng.randrange(9))]
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 20),
        "priority": rng.choice((0, 0, 0, 1, 2)),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "cache_salt": rng.choice(("", "", "other")),
    }


def random_move(world: World, rng: Random) -> None:
    """One of the moves that are possible, a step most often, so that queues are long and still move."""
    moves: list[Callable[[], object]] = [world.step] * 4
    if len(world.live()) < 9:
        is_remote = isinstance(world, DecodeWorld) and rng.random() < 0.6
        moves += [lambda: world.arrive(remote=is_remote, **random_arrival(rng))] * 2
    if world.live() and rng.random() < 0.2:
        moves += [lambda: world.cancel(rng.choice(world.live()))]
    if world.expected:
        moves += [lambda: world.offer(rng.choice(world.expected))]
    if world.remote:
        end = world.land if rng.random() < 0.8 else world.fail
        moves += [lambda: end(rng.choice(list(world.remote)))]
    if world.ended_remote:
        moves += [lambda: world.end_transfer(rng.choice(list(world.ended_remote)))]
    if isinstance(world, PrefillWorld) and (done := [s for s in world.pins if s.status is Status.FINISHED]):
        moves += [lambda: world.unpin(rng.choice(done))]
    with suppress(TooLarge):
        rng.choice(moves)()
    world.check()


@pytest.mark.parametrize("make_world", [local_world, decode_world, prefill_world])
@pytest.mark.parametrize("seed", range(20))
def test_long_lives_in_crowded_pools_go_as_a_naive_scheduler_says(make_world, seed) -> None:
    """Covers B04, G02, G04, G05: more waits here, and for longer, than in the lives above."""
    rng = Random(seed)
    swap = {} if make_world is prefill_world else {"num_host_blocks": rng.choice((0, 3, 20))}
    world = make_world(
        rng.choice((rng.randint(4, 12), rng.randint(4, 40))),
        max_num_seqs=rng.choice((1, 2, rng.randint(3, 8))),
        max_num_batched_tokens=rng.choice((rng.randint(1, 6), rng.randint(1, 24))),
        watermark=rng.choice((0.0, 0.05, 0.3)),
        long_prefill_token_threshold=rng.choice((0, 0, 1, 5)),
        priority_ageing_s=rng.choice((0.0, 3.0, 60.0)),
        prefix_caching=rng.random() < 0.8,
        **swap,
    )
    for _ in range(200):
        random_move(world, rng)
    world.finish_all()


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(6, 20),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 6),
    remote=st.lists(st.booleans(), min_size=1, max_size=8),
    priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=8),
    num_before=st.integers(0, 4),
)
def test_no_flood_keeps_anybody_waiting_for_ever(
    num_blocks, max_num_seqs, max_num_batched_tokens, remote, priorities, num_before
) -> None:
    """Somebody always waits, of any priority, and every transfer lands at once; still a prompt that waits is served,
    after those that rank before it and those that ran already."""
    world = decode_world(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        priority_ageing_s=2.0,
    )
    flood = zip(cycle(remote), cycle(priorities), strict=False)

    def run() -> None:
        while len(world.scheduler.waiting) < 3:
            is_remote, priority = next(flood)
            sequence = world.arrive(range(6), remote=is_remote, priority=priority, max_tokens=9)
            if is_remote:
                world.offer(sequence)
        world.step()
        for sequence in list(world.remote):
            world.land(sequence)

    for _ in range(num_before):
        run()
    patient = world.arrive(range(10, 20), priority=1, max_tokens=3)
    num_before_it, num_steps, rank = len(world.live()), 0, world.scheduler.ranking.rank
    while patient.status is not Status.FINISHED:
        run()
        num_above = sum(rank(sequence) <= rank(patient) for sequence in world.sequences)
        num_steps += 1
        assert num_steps < 50 * (num_before_it + num_above + max_num_batched_tokens), "it waits for ever"
