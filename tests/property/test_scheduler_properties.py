"""Random lives of schedulers; `support.scheduling.World` checks every step of them."""

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.scheduling import PrefillWorld, World, decode_world, local_world, prefill_world

from kvrelay.engine.errors import TooLarge
from kvrelay.engine.request import Sequence, Status

REPEATED = st.tuples(st.integers(0, 1), st.integers(1, 16)).map(lambda pair: [pair[0]] * pair[1])
PROMPTS = st.one_of(REPEATED, st.tuples(REPEATED, st.lists(st.integers(0, 2), max_size=8)).map(lambda p: p[0] + p[1]))
LIMITS = {
    "num_blocks": st.one_of(st.integers(4, 12), st.integers(4, 40)),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(1, 24),
    "watermark": st.sampled_from([0.0, 0.05, 0.3]),
    "prefix_caching": st.booleans(),
}
ARRIVAL = {
    "prompt": PROMPTS,
    "max_tokens": st.integers(1, 20),
    "priority": st.sampled_from([0, 0, 0, 1, 2]),
    "n": st.sampled_from([1, 1, 1, 2, 3]),
    "cache_salt": st.sampled_from(["", "", "other"]),
}
_SETTINGS = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class LocalMachine(RuleBasedStateMachine):
    """Prompts come, run, are cancelled, with pools too small for them."""

    world: World

    @initialize(**LIMITS)
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

    @initialize(**LIMITS)
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
def test_every_random_life_keeps_the_invariants_and_comes_to_an_end(machine) -> None:
    """Covers A06, A07, B01, B02, B04, G02, G04, G05."""
    run_state_machine_as_test(machine, settings=_SETTINGS)
