"""Random lives of an engine in a pool too small, with host memory that may be too small as well and may fail.

The executor compares the KV of every row with what its tokens say, so no sequence ever computes on a block that it did
not fill itself; each choice's tokens are those that it has alone.
"""

from collections import Counter
from itertools import count

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduling import make_config, make_sequence
from support.slot_executor import SlotExecutor, expected_tokens

from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import FakeClock
from kvrelay.engine.engine import Engine
from kvrelay.engine.errors import TooLarge
from kvrelay.engine.request import RequestKey, Sequence, Status
from kvrelay.engine.scheduler import Scheduler

BLOCK_SIZE = 4
SHARED = st.tuples(st.integers(0, 1), st.integers(1, 16)).map(lambda pair: [pair[0]] * pair[1])
PROMPTS = st.tuples(SHARED, st.lists(st.integers(0, 2), max_size=8)).map(lambda parts: parts[0] + parts[1])


class SwapMachine(RuleBasedStateMachine):
    """Requests of one choice or several come, run, give way, come back and are cancelled."""

    @initialize(
        num_blocks=st.one_of(st.integers(4, 12), st.integers(4, 40)),
        num_host_blocks=st.integers(0, 20),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        watermark=st.sampled_from([0.0, 0.05, 0.3]),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks: int, num_host_blocks: int, prefix_caching: bool, **limits) -> None:
        config = make_config(prefix_caching=prefix_caching, **limits)
        self.executor = SlotExecutor(num_blocks, num_host_blocks, BLOCK_SIZE)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            config, self.pool, LocalAdmission(BLOCK_SIZE, config.watermark), num_host_blocks=num_host_blocks
        )
        self.engine = Engine(self.scheduler, self.executor, (), FakeClock())
        self.sequences: list[Sequence] = []  # the forked ones too
        self.output: dict[tuple[RequestKey, int], list[int]] = {}
        self.numbers = count()
        self.total_length = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def arrive(self, prompt: list[int], **options) -> None:
        sequence = make_sequence(prompt, number=next(self.numbers), **options)
        try:
            self.scheduler.add(sequence)
        except TooLarge:
            return
        self.sequences.append(sequence)
        self.output |= {(sequence.key, choice): [] for choice in sequence.choices}
        self.total_length += len(prompt) + options["max_tokens"] * options["n"]

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @precondition(lambda self: self.scheduler.swapped)
    @rule(data=st.data())
    def cancel_a_swapped_one(self, data) -> None:
        self._cancel(data.draw(st.sampled_from(self.scheduler.swapped)))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self._cancel(data.draw(st.sampled_from(self.live())))

    @rule(out=st.booleans(), back=st.booleans())
    def host_memory_fails_from_now_on(self, out: bool, back: bool) -> None:
        self.executor.fails_to_swap_out, self.executor.fails_to_swap_in = out, back

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.pool.check_integrity()
        self.scheduler.swap_space.check_integrity()
        references = Counter(b for sequence in self.sequences for b in sequence.block_table)
        assert references == {b: self.pool.num_references(b) for b in references}
        assert self.pool.counts().owned == len(references)
        held = [b for sequence in self.sequences for b in sequence.host_block_ids]
        statistics = self.scheduler.statistics()
        assert len(set(held)) == len(held) == statistics.swap.num_host_blocks - statistics.swap.num_free_host_blocks
        by_status = Counter(sequence.status for sequence in self.sequences)
        assert statistics.swap.num_swapped == by_status[Status.SWAPPED]
        assert statistics.num_waiting == by_status[Status.SWAPPED] + by_status[Status.WAITING]
        for sequence in self.sequences:
            assert bool(sequence.host_block_ids) == (sequence.status is Status.SWAPPED)
            assert bool(sequence.block_table) == (sequence.status is Status.RUNNING)
            assert sequence.num_preemptions <= len(self.sequences), "it gives way again and again"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        limit = 100 + 10 * self.total_length
        for _ in range(limit):
            if not self.live():
                break
            self._step()
        assert not self.live(), f"no end after {limit} steps"
        self.holds()
        wanted = {sequence.key: sequence.request for sequence in self.sequences}
        for (key, choice), tokens in self.output.items():
            assert tokens == expected_tokens(wanted[key], choice)
        assert self.pool.counts().owned == 0
        assert self.scheduler.swap_space.num_free == self.executor.num_host_blocks

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]

    def _cancel(self, sequence: Sequence) -> None:
        for choice in sequence.choices:
            del self.output[sequence.key, choice]
        self.scheduler.abort(sequence)

    def _step(self) -> None:
        plan, scheduled = self.engine.plan()
        for sequence in plan.swapped_out:
            lost = sequence.status is Status.WAITING
            assert lost == (sequence.num_computed_tokens == 0)
            assert not lost or self.executor.fails_to_swap_out
        outcome = self.engine.execute(plan, scheduled)
        for row in outcome.outputs:
            assert row.error is None, row.error
            self.sequences += [sequence for sequence in row.going_on if sequence not in self.sequences]
            for token in row.tokens:
                self.output[row.sequence.key, token.choice].append(token.token_id)


TestSwap = SwapMachine.TestCase
TestSwap.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
