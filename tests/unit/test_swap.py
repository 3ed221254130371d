"""Who goes to host memory and comes back, case by case; `support.scheduling.World` checks every step besides. Block
size is 4."""

import pytest
from support.scheduling import BLOCK_SIZE, World, local_world, make_config, make_sequence
from support.slot_executor import SlotExecutor, expected_tokens

from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import FakeClock
from kvrelay.engine.engine import Engine, StepOutcome
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Sequence, Status
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.step import Applied
from kvrelay.engine.swap_space import SwapSpace


def numbers(length: int, first: int = 0) -> range:
    """A prompt that shares no block with one of another `first`."""
    return range(first, first + length)


def step_until_swapped(world: World, sequence: Sequence) -> StepPlan:
    for _ in range(100):
        plan = world.step()
        if sequence.status is Status.SWAPPED:
            return plan
    raise AssertionError(f"{sequence.key} was never swapped out")


def step_until_back(world: World, sequence: Sequence) -> StepPlan:
    for _ in range(100):
        plan = world.step()
        if sequence.status is not Status.SWAPPED:
            return plan
    raise AssertionError(f"{sequence.key} never came back")


def run_until_done(world: World, sequence: Sequence) -> None:
    for _ in range(100):
        world.step()
        if sequence.status is Status.FINISHED:
            return
    raise AssertionError(f"{sequence.key} has not ended")


class Watched(World):
    """Keeps what was copied last."""

    def _swap(self, applied: Applied) -> None:
        self.applied = applied
        super()._swap(applied)


def watched_world(num_blocks: int, num_host_blocks: int, **options) -> Watched:
    return Watched(local_world(num_blocks, num_host_blocks=num_host_blocks, **options).scheduler)


# --- the ledger


def test_host_blocks_are_taken_once_and_given_back_once() -> None:
    space = SwapSpace(3)
    first, second = space.allocate(2), space.allocate(1)
    assert sorted(first + second) == [0, 1, 2]
    assert space.num_free == 0
    with pytest.raises(AssertionError, match="1 host blocks wanted, 0 are free"):
        space.allocate(1)
    space.release(first)
    assert space.num_free == 2
    with pytest.raises(AssertionError, match="released, but not taken"):
        space.release(first)
    space.check_integrity()


def test_host_blocks_used_last_are_taken_first() -> None:
    """Their memory has been written before."""
    space = SwapSpace(100)
    used = space.allocate(3)
    space.release(used)
    assert set(space.allocate(3)) == set(used)


# --- out


def test_who_gives_way_takes_what_it_has_computed_to_host_memory_a_partial_block_too() -> None:
    world = watched_world(6, 20)
    old, young = world.arrive(numbers(6), max_tokens=14), world.arrive(numbers(5, 100), max_tokens=9)
    plan = step_until_swapped(world, young)
    assert plan.preempted == plan.swapped_out == (young,)
    (swap,) = world.applied.swap_outs
    assert young.num_computed_tokens == young.num_tokens - 1
    assert young.num_computed_tokens % BLOCK_SIZE, "no partial block"
    assert len(swap.copies) == len(young.host_block_ids) == -(-young.num_computed_tokens // BLOCK_SIZE)
    assert young.block_table == []
    statistics = world.scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting, statistics.swap.num_swapped) == (1, 1, 1)
    assert statistics.swap.num_free_host_blocks == 20 - len(swap.copies)
    assert old.status is Status.RUNNING
    world.finish_all()
    statistics = world.scheduler.statistics()
    assert statistics.swap.num_swapped_out == statistics.swap.num_swapped_in == statistics.num_preemptions == 1


def test_who_does_not_fit_in_host_memory_as_a_whole_is_computed_again() -> None:
    world = watched_world(6, 2)
    old, young = world.arrive(numbers(4), max_tokens=12), world.arrive(numbers(9, 100), max_tokens=9)
    while not young.num_preemptions:
        world.step()
    assert (young.status, young.num_computed_tokens) == (Status.WAITING, 0)
    assert world.scheduler.swap_space.num_free == 2
    world.finish_all()
    assert old.num_preemptions == 0


def test_of_several_that_give_way_at_once_the_older_has_host_memory_first() -> None:
    """And the next one has what is left, if it is enough."""
    world = watched_world(12, 4)
    lows = [world.arrive(numbers(length, 100 * length), priority=1, max_tokens=9) for length in (13, 9, 3)]
    world.step()
    world.arrive(numbers(44), max_tokens=3)
    plan = world.step()
    assert set(plan.preempted) == set(lows)
    assert plan.swapped_out == (lows[0],)  # 4 blocks; the others would take 3 and 1
    world.finish_all()
    world = watched_world(12, 3)
    lows = [world.arrive(numbers(length, 100 * length), priority=1, max_tokens=9) for length in (13, 3, 9)]
    world.step()
    world.arrive(numbers(44), max_tokens=3)
    assert world.step().swapped_out == (lows[1],)  # 13 tokens do not fit; 3 do; for 9 there is no room beside them
    world.finish_all()


# --- back


def test_who_comes_back_goes_on_at_once_and_computes_nothing_again() -> None:
    world = watched_world(6, 20)
    old, young = world.arrive(numbers(6), max_tokens=10), world.arrive(numbers(6, 100), max_tokens=12)
    step_until_swapped(world, young)
    num_computed, num_tokens = young.num_computed_tokens, young.num_tokens
    queries = world.scheduler.statistics().num_prefix_queries
    plan = step_until_back(world, young)
    assert old.status is Status.FINISHED
    (row,) = plan.scheduled
    assert (row.sequence, row.start, row.end) == (young, num_computed, num_tokens)
    assert young.num_tokens == num_tokens + 1
    assert world.scheduler.swap_space.num_free == 20
    assert young.num_cached_tokens == 0
    assert world.scheduler.statistics().num_prefix_queries == queries
    world.finish_all()


@pytest.mark.parametrize(("caching", "num_copied"), [(True, 1), (False, 3)])
def test_only_what_the_prefix_cache_does_not_hold_any_more_is_copied_back(caching, num_copied) -> None:
    world = watched_world(6, 20, prefix_caching=caching)
    low = world.arrive(numbers(9), priority=1, max_tokens=9)
    world.step()
    world.step()
    urgent = world.arrive(numbers(13, 100), max_tokens=2)
    step_until_swapped(world, low)
    if caching:
        world.cancel(urgent)  # before it has evicted the blocks that were full
    plan = step_until_back(world, low)
    (swap,) = world.applied.swap_ins
    assert len(swap.copies) == num_copied
    assert len(plan.admitted[0].cached_block_ids) == 3 - num_copied
    world.finish_all()


def test_what_came_back_can_be_found_in_the_prefix_cache_again() -> None:
    world = watched_world(5, 20)
    low = world.arrive(numbers(9), priority=1, max_tokens=9)
    world.step()
    world.arrive(numbers(19, 100), max_tokens=1)
    step_until_swapped(world, low)
    step_until_back(world, low)
    assert len(world.pool.lookup(low.block_hashes)) == 2
    world.finish_all()


def test_a_prompt_that_gave_way_half_computed_is_computed_from_there() -> None:
    world = watched_world(8, 20, max_num_batched_tokens=6)
    low = world.arrive(numbers(20), priority=1, max_tokens=2)
    world.step()
    world.step()
    urgent = world.arrive(numbers(12, 100), max_tokens=2)
    step_until_swapped(world, low)
    assert low.num_computed_tokens == 18
    rows = []
    while low.status is not Status.FINISHED:
        rows += [(row.start, row.end) for row in world.step().scheduled if row.sequence is low]
    assert rows == [(18, 20), (20, 21)]
    assert urgent.status is Status.FINISHED


def test_what_others_have_computed_meanwhile_moves_nobody_who_comes_back() -> None:
    """The prefix cache holds more of its prompt by then than it had computed."""
    world = watched_world(8, 20, max_num_batched_tokens=9)
    low = world.arrive(numbers(30), priority=1, max_tokens=2)
    for _ in range(3):
        world.step()
    world.arrive(numbers(30), max_tokens=2)
    step_until_swapped(world, low)
    assert low.num_computed_tokens == 27
    (row,) = step_until_back(world, low).scheduled
    assert (row.start, row.end) == (27, 30)
    world.finish_all()


def test_those_swapped_out_start_before_older_ones_that_have_nothing() -> None:
    """The older one did not fit in host memory; it starts as soon as there is room for it too."""
    world = watched_world(12, 1)
    older, younger = (world.arrive(numbers(length, 100 * length), priority=1, max_tokens=6) for length in (9, 3))
    world.step()
    urgent = world.arrive(numbers(44), max_tokens=2)
    plan = world.step()
    assert set(plan.preempted) == {older, younger}
    assert plan.swapped_out == (younger,)
    while urgent.status is not Status.FINISHED:
        world.step()
    assert [start.sequence for start in world.step().admitted] == [younger, older]
    world.finish_all()


def test_a_more_urgent_one_starts_before_those_swapped_out_and_an_equal_one_after_them() -> None:
    world = watched_world(12, 20, max_num_seqs=1)
    low = world.arrive(numbers(9), priority=1, max_tokens=12)
    world.step()
    first, second = (world.arrive(numbers(6, 100 * i), max_tokens=2) for i in (1, 2))
    equal = world.arrive(numbers(6, 300), priority=1, max_tokens=2)
    started = []
    while world.live():
        started += [start.sequence for start in world.step().admitted]
    assert started == [first, second, low, equal]


def test_those_swapped_out_leave_the_watermark_free_too() -> None:
    """Else they would be the next to give way again, as soon as one above them grows."""
    world = watched_world(12, 20, watermark=0.25, prefix_caching=False)
    old = world.arrive(numbers(15), max_tokens=20)
    low = world.arrive(numbers(8, 100), priority=1, max_tokens=9)
    world.step()
    urgent = world.arrive(numbers(12, 200), max_tokens=9)
    step_until_swapped(world, low)
    run_until_done(world, urgent)
    assert world.pool.num_free >= 3, "low does not fit in any case"
    world.step()
    assert low.status is Status.SWAPPED
    run_until_done(world, old)
    world.step()
    assert low.status is Status.RUNNING
    world.finish_all()


def test_the_oldest_comes_back_whatever_the_watermark() -> None:
    world = watched_world(8, 20, watermark=0.9)
    low = world.arrive(numbers(20), priority=1, max_tokens=6)
    world.step()
    world.arrive(numbers(12, 100), max_tokens=2)
    step_until_swapped(world, low)
    step_until_back(world, low)
    assert low.status is Status.RUNNING
    world.finish_all()


def test_sequences_that_share_blocks_are_swapped_and_come_back_each_by_itself() -> None:
    world = watched_world(8, 20, prefix_caching=False)
    choices = world.arrive(numbers(10), priority=1, n=3, max_tokens=9)
    world.step()
    urgent = world.arrive(numbers(24, 100), max_tokens=2)
    forks = [sequence for sequence in world.sequences if sequence.key == choices.key]
    assert len(forks) == len([s for s in forks if s.status is Status.RUNNING]) > 1
    step_until_swapped(world, forks[-1])
    assert all(fork.status is Status.SWAPPED for fork in forks)
    assert world.scheduler.swap_space.num_free == 20 - 3 * len(forks)
    world.cancel(forks[0])
    assert world.scheduler.swap_space.num_free == 20 - 3 * (len(forks) - 1)
    world.finish_all()
    assert urgent.status is Status.FINISHED


def test_an_abort_gives_host_blocks_back_at_once() -> None:
    world = watched_world(6, 20)
    world.arrive(numbers(6), max_tokens=14)
    young = world.arrive(numbers(6, 100), max_tokens=9)
    step_until_swapped(world, young)
    world.cancel(young)
    world.cancel(young)
    assert (young.status, young.host_block_ids) == (Status.FINISHED, ())
    assert world.scheduler.swap_space.num_free == 20
    world.finish_all()


def test_kv_for_little_more_than_one_request_serves_many_without_computing_anything_twice() -> None:
    """G02, B04: bounded preemptions, and somebody advances in each step."""
    world = watched_world(17, 100, watermark=0.05)
    sequences = [world.arrive(numbers(24, 100 * i), max_tokens=28) for i in range(6)]
    num_computed = 0
    while world.live():
        num_computed += sum(row.num_new_tokens for row in world.step().scheduled)
    assert num_computed == 6 * (24 + 28 - 1)
    assert max(s.num_preemptions for s in sequences) < 5
    assert world.scheduler.statistics().swap.num_swapped_out > 0


# --- the engine


class Rig:
    """An engine over slots, and what it makes of sequences."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True) -> None:
        self.executor = SlotExecutor(num_blocks, 20, BLOCK_SIZE)
        pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(make_config(), pool, LocalAdmission(BLOCK_SIZE, 0.0), num_host_blocks=20)
        self.engine = Engine(self.scheduler, self.executor, (), FakeClock())
        self.output: dict[Sequence, list[int]] = {}

    def add(self, prompt: range, **options) -> Sequence:
        sequence = make_sequence(prompt, number=len(self.output), **options)
        self.output[sequence] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepOutcome:
        outcome = self.engine.execute(*self.engine.plan())
        for row in outcome.outputs:
            assert row.error is None
            self.output[row.sequence] += [token.token_id for token in row.tokens]
        return outcome

    def finish(self) -> None:
        """Everybody gets the tokens that it has alone, and all is given back."""
        for _ in range(100):
            self.step()
        for sequence, tokens in self.output.items():
            assert tokens == expected_tokens(sequence.request, 0)
        assert self.scheduler.pool.counts().owned == 0
        assert self.scheduler.swap_space.num_free == 20


def rig_under_pressure() -> tuple[Rig, Sequence, Sequence, Sequence]:
    """One that is not concerned, one of low priority, and an urgent one that will need its place."""
    rig = Rig(12)
    beside, low = rig.add(numbers(6, 500), max_tokens=9), rig.add(numbers(18), priority=1, max_tokens=6)
    rig.step()
    return rig, beside, low, rig.add(numbers(30, 100), max_tokens=3)


def test_kv_is_in_host_memory_before_anybody_is_told_of_its_blocks() -> None:
    """What is planned may be granted to another node, which writes there at once: the engine has to have copied."""
    rig, _, low, urgent = rig_under_pressure()
    before, block_table = rig.executor.slots.copy(), list(low.block_table)
    plan, scheduled = rig.engine.plan()
    assert plan.swapped_out == (low,)
    for block_id, host_block_id in zip(block_table, low.host_block_ids, strict=True):
        assert (rig.executor.host_slots[host_block_id] == before[block_id]).all()
    assert set(urgent.block_table) & set(block_table), "none of its blocks is taken"
    rig.engine.execute(plan, scheduled)


def test_one_that_comes_back_into_blocks_of_one_that_gives_way_for_it_spoils_nothing() -> None:
    rig = Rig(10, prefix_caching=False)
    oldest, returning = rig.add(numbers(7), max_tokens=9), rig.add(numbers(18, 100), max_tokens=6)
    low = rig.add(numbers(9, 200), priority=1, max_tokens=9)
    rig.step()
    rig.add(numbers(12, 300), priority=-1, max_tokens=2)
    assert rig.step().plan.swapped_out == (returning,)
    rig.step()  # the oldest takes the block that was left
    block_table = list(low.block_table)
    plan = rig.step().plan
    assert (plan.swapped_out, plan.admitted[0].sequence) == ((low,), returning)
    assert set(returning.block_table) & set(block_table), "it got none of the blocks that were given up"
    rig.finish()
    assert oldest.num_preemptions == 0


def test_a_swap_out_that_fails_costs_its_sequence_a_recompute_and_nobody_else_anything(caplog) -> None:
    rig, beside, low, urgent = rig_under_pressure()
    rig.executor.fails_to_swap_out = True
    assert {row.sequence for row in rig.step().outputs} == {beside, urgent}
    assert (low.status, low.num_computed_tokens, low.host_block_ids) == (Status.WAITING, 0, ())
    assert rig.scheduler.swap_space.num_free == 20
    assert [record.message for record in caplog.records] == ["swap_failed"]
    rig.finish()


def test_a_swap_in_that_fails_costs_its_sequence_a_recompute_and_nobody_else_anything(caplog) -> None:
    rig, beside, low, urgent = rig_under_pressure()
    rig.step()
    assert low.status is Status.SWAPPED
    rig.executor.fails_to_swap_in = True
    while low.status is Status.SWAPPED:
        outputs = rig.step().outputs
    assert {row.sequence for row in outputs} <= {beside, urgent}
    assert (low.status, low.num_computed_tokens, low.block_table) == (Status.WAITING, 0, [])
    assert rig.scheduler.swap_space.num_free == 20
    assert [record.message for record in caplog.records] == ["swap_failed"]
    rig.finish()
