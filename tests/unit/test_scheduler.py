"""The scheduler, case by case; `support.scheduling.World` checks every step besides. Block size is 4."""

from dataclasses import replace

import pytest
from support.scheduling import BLOCK_SIZE, World, decode_world, local_world, make_config, make_sequence, prefill_world

from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.errors import ConfigError, TooLarge
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Sequence, Status
from kvrelay.engine.scheduler import Scheduler


def num_new_tokens(plan: StepPlan) -> dict[Sequence, int]:
    return {row.sequence: row.num_new_tokens for row in plan.scheduled}


def numbers(length: int, first: int = 0) -> range:
    """A prompt that shares no block with one of another `first`."""
    return range(first, first + length)


def run_until_done(world: World, sequence: Sequence, limit: int = 200) -> int:
    """Steps until a sequence has ended."""
    for num_steps in range(1, limit + 1):
        world.step()
        if sequence.status is Status.FINISHED:
            return num_steps
    raise AssertionError(f"{sequence.key} has not ended after {limit} steps")


# --- tokens of a step


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(length) -> None:
    """G03."""
    world = local_world(80, max_num_batched_tokens=64)
    sequence = world.arrive(numbers(length), max_tokens=3)
    chunks = []
    while sequence.num_output_tokens == 0:
        chunks.append(num_new_tokens(world.step())[sequence])
    assert sum(chunks) == length
    assert chunks[:-1] == [64] * (len(chunks) - 1)
    world.finish_all()


def test_who_waits_behind_a_long_prompt_starts_in_what_its_last_chunk_leaves() -> None:
    """G03."""
    world = local_world(80, max_num_batched_tokens=64)
    long, short = world.arrive(numbers(100)), world.arrive(numbers(10, 500))
    world.step()
    assert num_new_tokens(world.step()) == {long: 36, short: 10}


def test_prompts_about_as_long_as_the_budget_hold_up_nobody_behind_them() -> None:
    """G03: each of them is as many steps away as the tokens before it."""
    world = local_world(200, max_num_batched_tokens=64)
    sequences = [world.arrive(numbers(n, 1000 * i), max_tokens=2) for i, n in enumerate((63, 64, 65, 200, 1, 7))]
    world.finish_all()
    assert [s.num_output_tokens for s in sequences] == [2] * 6
    assert world.num_steps <= -(-(63 + 64 + 65 + 200 + 1 + 7 + 6) // 64) + 2


def test_a_threshold_leaves_tokens_of_each_step_to_those_behind_a_long_prompt() -> None:
    """G03: at its start and while it runs."""
    world = local_world(80, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    long, short = world.arrive(numbers(100)), world.arrive(numbers(16, 500))
    assert num_new_tokens(world.step()) == {long: 16, short: 16}
    late = world.arrive(numbers(30, 700))
    assert num_new_tokens(world.step()) == {long: 16, short: 1, late: 16}
    assert num_new_tokens(world.step()) == {long: 16, short: 1, late: 14}


def test_a_threshold_below_zero_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="long_prefill_token_threshold = -1"):
        make_config(long_prefill_token_threshold=-1)


@pytest.mark.parametrize("threshold", [1, 3, 1000])
def test_under_any_threshold_the_oldest_advances_in_each_step(threshold) -> None:
    world = local_world(80, max_num_batched_tokens=8, long_prefill_token_threshold=threshold)
    oldest = world.arrive(numbers(20))
    for i in range(1, 6):
        world.arrive(numbers(9, 100 * i))
    while oldest.num_output_tokens == 0:
        num_left = 20 - oldest.num_computed_tokens
        assert num_new_tokens(world.step())[oldest] >= min(threshold, num_left, 3)
    world.finish_all()


def test_a_long_prompt_does_not_hold_up_those_behind_it_that_decode() -> None:
    world = local_world(80, max_num_batched_tokens=16)
    decoding = [world.arrive(numbers(4, 100 * i), max_tokens=30) for i in range(1, 4)]
    world.step()
    urgent = world.arrive(numbers(40), priority=-1)
    world.step()
    assert world.scheduler.running[0] is urgent
    assert num_new_tokens(world.step()) == {urgent: 13} | dict.fromkeys(decoding, 1)


def test_with_fewer_tokens_than_running_sequences_the_oldest_get_them() -> None:
    world = local_world(80, max_num_batched_tokens=2)
    sequences = [world.arrive([i], max_tokens=9) for i in range(3)]
    world.step()
    assert list(num_new_tokens(world.step())) == sequences[:2]
    world.finish_all()


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    world = local_world(80, max_num_seqs=2)
    first, second, third = (world.arrive(numbers(4, 100 * i), max_tokens=2) for i in range(3))
    assert list(num_new_tokens(world.step())) == [first, second]
    world.step()
    assert list(num_new_tokens(world.step())) == [third]


def test_an_empty_scheduler_plans_nothing() -> None:
    world = local_world(4)
    assert world.step().is_empty
    sequence = world.arrive([1, 2], max_tokens=1)
    assert not world.step().is_empty
    assert sequence.status is Status.FINISHED
    assert world.step().is_empty


# --- the prefix cache


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8)])
def test_a_cached_prompt_leaves_at_least_one_token_to_compute(length, num_cached) -> None:
    world = local_world(20)
    run_until_done(world, world.arrive(numbers(length), max_tokens=1))
    again = world.arrive(numbers(length), max_tokens=1)
    assert num_new_tokens(world.step()) == {again: length - num_cached}
    assert again.num_cached_tokens == num_cached
    statistics = world.scheduler.statistics()
    assert (statistics.num_prefix_queries, statistics.num_prefix_hits) == (2 * length, num_cached)


def test_another_salt_finds_nothing() -> None:
    """E07."""
    world = local_world(20)
    run_until_done(world, world.arrive(numbers(9), max_tokens=1, cache_salt="one"))
    again = world.arrive(numbers(9), max_tokens=1, cache_salt="two")
    world.step()
    assert again.num_cached_tokens == 0


def test_blocks_are_shared_as_soon_as_they_are_computed_and_outputs_are_cached_too() -> None:
    world = local_world(20)
    first = world.arrive(numbers(8), max_tokens=6)
    world.step()
    second = world.arrive([*numbers(8), 77])
    world.step()
    assert second.block_table[:2] == first.block_table[:2]
    run_until_done(world, first)
    third = world.arrive([*first.token_ids, 88])
    world.step()
    assert third.num_cached_tokens == 12


def test_a_start_s_cached_blocks_are_not_evicted_for_the_growth_of_another() -> None:
    world = local_world(4)
    for prompt in (numbers(5), numbers(9, 100)):
        run_until_done(world, world.arrive(prompt, max_tokens=1))
    growing = world.arrive(numbers(3, 200))
    world.step()
    world.step()
    assert world.pool.counts().cached == 3
    start = world.arrive(numbers(5), max_tokens=2)
    plan = world.step()
    assert [growth.sequence for growth in plan.growth] == [growing]
    assert [(admitted.sequence, admitted.num_new_blocks) for admitted in plan.admitted] == [(start, 1)]
    assert start.num_cached_tokens == 4
    world.finish_all()


def test_blocks_of_a_row_that_failed_are_never_found() -> None:
    """A step that fails is not taken in: its rows' blocks hold nobody knows what."""
    world = local_world(20)
    sequence = world.arrive(numbers(9))
    scheduled = world.scheduler.apply(world.scheduler.plan()).scheduled
    assert [row.sequence for row in scheduled] == [sequence]
    world.scheduler.abort(sequence)
    world.pool.check_integrity()
    assert world.pool.counts().free == 20


# --- room and preemption


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    """B04."""
    world = local_world(5)
    with pytest.raises(
        TooLarge, match=r"num_tokens = 10: with max_tokens = 11 and n = 1 it takes up to 6 KV blocks of 4 .* 5"
    ):
        world.arrive(numbers(10), max_tokens=11)
    world.arrive(numbers(10), max_tokens=10)
    world.finish_all()


@pytest.mark.parametrize(
    ("length", "options", "most"),
    [
        (16, {"max_tokens": 4}, 5),
        (17, {"max_tokens": 3}, 5),
        (4, {"max_tokens": 4, "n": 4}, 5),  # the prompt's block and one for each choice
        (7, {"max_tokens": 1, "n": 4}, 5),
        (19, {"max_tokens": 1, "n": 1}, 5),
    ],
)
@pytest.mark.parametrize("watermark", [0.0, 0.9])
@pytest.mark.parametrize("remote", [False, True])
def test_what_just_fits_is_served_and_what_does_not_is_refused(length, options, most, watermark, remote) -> None:
    """B04: prompts and grants, one choice or several, whatever the watermark."""
    world = decode_world(most, watermark=watermark)
    world.arrive(numbers(length), remote=remote, **options)
    world.finish_all()
    world = decode_world(most - 1, watermark=watermark)
    with pytest.raises(TooLarge, match=f"{most} KV blocks of 4 tokens; this node has {most - 1}"):
        world.arrive(numbers(length), remote=remote, **options)
    assert world.step().is_empty


def test_more_choices_than_a_step_has_sequences_are_refused() -> None:
    world = local_world(40, max_num_seqs=3)
    with pytest.raises(TooLarge, match="n = 4: this node runs 3 sequences at once"):
        world.arrive(numbers(4), n=4)
    world.arrive(numbers(4), n=3)
    world.finish_all()


def test_a_resumed_choice_is_measured_with_the_output_it_comes_with() -> None:
    """Even if that is more than it may have: a router's mistake is refused, and blocks no queue."""
    world = local_world(5)
    request = replace(make_sequence(numbers(10), max_tokens=4).request, output_token_ids=tuple(range(10)))
    with pytest.raises(TooLarge, match="up to 6 KV blocks"):
        world.scheduler.add(Sequence(request))


def test_the_youngest_gives_way_keeps_its_rank_and_is_recomputed() -> None:
    world = local_world(6)
    oldest, middle, youngest = (world.arrive(numbers(6, 100 * i), max_tokens=10) for i in range(3))
    world.step()
    for _ in range(2):
        assert not world.step().preempted
    plan = world.step()
    assert plan.preempted == (youngest,)
    assert youngest.status is Status.WAITING
    assert youngest.num_computed_tokens == 0
    late = world.arrive(numbers(2, 900), max_tokens=1)
    assert world.scheduler.waiting == [youngest, late]
    world.finish_all()
    assert (oldest.num_preemptions, middle.num_preemptions) == (0, 1)
    assert all(s.num_output_tokens == 10 for s in (oldest, middle, youngest))
    assert youngest.num_cached_tokens == 0


def test_a_preempted_sequence_finds_its_own_blocks_where_nobody_took_them() -> None:
    world = local_world(6)
    first, second = world.arrive(numbers(4), max_tokens=9), world.arrive(numbers(12, 100), max_tokens=9)
    while not second.num_preemptions:
        world.step()
    run_until_done(world, first)
    start = next(iter(world.step().admitted))
    assert start.sequence is second
    assert len(start.cached_block_ids) == 3


def test_kv_for_little_more_than_one_request_serves_many() -> None:
    """G02: room for 1.3 requests, six of them: bounded preemptions, and the oldest advances in each step."""
    world = local_world(17, watermark=0.05)
    sequences = [world.arrive(numbers(24, 100 * i), max_tokens=28) for i in range(6)]
    while live := world.live():
        assert live[0] in num_new_tokens(world.step())
    assert all(s.num_output_tokens == 28 for s in sequences)
    assert max(s.num_preemptions for s in sequences) < 5
    assert world.num_steps <= 6 * 28


def test_what_the_youngest_leaves_in_the_cache_is_evicted_first() -> None:
    """They give way together; who comes back first finds its blocks."""
    world = local_world(6)
    first, second = (world.arrive(numbers(7, 100 * i), priority=1, max_tokens=2) for i in (1, 2))
    world.step()
    urgent = world.arrive(numbers(19), max_tokens=2)
    plan = world.step()
    assert plan.preempted == (second, first)
    run_until_done(world, urgent)
    plan = world.step()
    assert [(start.sequence, len(start.cached_block_ids)) for start in plan.admitted] == [(first, 1), (second, 0)]


def test_nobody_is_preempted_whose_blocks_a_transfer_holds_too() -> None:
    """G02: the oldest skips the step instead, and advances when the transfer has ended."""
    pool = BlockPool(4, BLOCK_SIZE)
    scheduler = Scheduler(make_config(), pool, LocalAdmission(BLOCK_SIZE, 0.0))
    old, young = make_sequence(numbers(3), number=0), make_sequence(numbers(11, 100), number=1, max_tokens=4)
    for sequence in (old, young):
        scheduler.add(sequence)
    scheduler.advance(scheduler.apply(scheduler.plan()).scheduled)
    pinned = list(young.block_table)
    pool.acquire(pinned)
    old.token_ids += [1, 2]
    old.num_computed_tokens = 4
    young.token_ids.append(1)
    plan = scheduler.plan()
    assert plan.preempted == ()
    assert [row.sequence for row in plan.scheduled] == [young]
    pool.release(pinned)
    plan = scheduler.plan()
    assert plan.preempted == (young,)
    assert [row.sequence for row in plan.scheduled] == [old]


def test_nobody_is_preempted_where_that_would_not_do() -> None:
    """G02: of the two that an urgent one outranks, one is pinned and the other too small."""
    world = local_world(8)
    small, pinned = (world.arrive(numbers(n, 100 * n), priority=1, max_tokens=4) for n in (3, 23))
    world.step()
    world.pool.acquire(pinned.block_table)
    world.scheduler.add(make_sequence(numbers(11), number=9))
    plan = world.scheduler.plan()
    assert plan.preempted == ()
    assert plan.admitted == ()
    assert [row.sequence for row in plan.scheduled] == [small, pinned]


def test_nobody_starts_in_a_step_in_which_somebody_gave_way() -> None:
    world = local_world(5)
    oldest, youngest = world.arrive(numbers(6), max_tokens=10), world.arrive(numbers(10, 100), max_tokens=4)
    small = None
    while not youngest.num_preemptions:
        small = small or world.arrive(numbers(1, 500), max_tokens=1)
        plan = world.step()
    assert plan.preempted == (youngest,)
    assert plan.admitted == ()
    assert world.pool.num_free > 0
    assert oldest.status is Status.RUNNING


def test_an_urgent_request_takes_the_place_of_one_of_lower_priority() -> None:
    """G05, G04: the one that gives way had been scheduled in this very plan."""
    world = local_world(40, max_num_seqs=2, max_num_batched_tokens=8)
    lows = [world.arrive(numbers(4, 100 * i), priority=1, max_tokens=40) for i in range(1, 3)]
    world.step()
    urgent = world.arrive(numbers(20), max_tokens=5)
    plan = world.step()
    assert plan.preempted == (lows[1],)
    assert [start.sequence for start in plan.admitted] == [urgent]
    assert num_new_tokens(plan) == {lows[0]: 1, urgent: 7}
    run_until_done(world, urgent)
    assert all(low.status is not Status.FINISHED for low in lows)
    world.finish_all()
    assert [low.num_preemptions for low in lows] == [0, 1]


def test_a_seat_is_not_taken_from_one_whose_blocks_a_transfer_holds_too() -> None:
    """G02: its blocks are on their way to another node, and would be computed again elsewhere."""
    world = prefill_world(40, max_num_seqs=1, max_num_batched_tokens=8)
    low = world.arrive(numbers(12), priority=1)
    world.step()
    urgent = world.arrive(numbers(4, 100))
    world.step()
    assert (low.status, low.num_preemptions, urgent.status) == (Status.FINISHED, 0, Status.WAITING)


def test_only_as_many_give_way_to_an_urgent_one_as_it_needs() -> None:
    """The smallest is the youngest and would go first, but without the next one it does not do."""
    world = local_world(10)
    oldest = world.arrive(numbers(3, 100), priority=1)
    large = world.arrive(numbers(23, 200), priority=1)
    small = world.arrive(numbers(7, 300), priority=1)
    world.step()
    assert world.pool.num_free == 1
    urgent = world.arrive(numbers(19))
    plan = world.step()
    assert plan.preempted == (large,)
    assert world.scheduler.running == [urgent, oldest, small]


def test_equal_priority_is_never_preempted_for_a_seat() -> None:
    """G05."""
    world = local_world(40, max_num_seqs=2)
    sequences = [world.arrive(numbers(4, 100 * i), max_tokens=12) for i in range(4)]
    world.finish_all()
    assert [s.num_preemptions for s in sequences] == [0, 0, 0, 0]


def test_the_unimportant_are_served_in_the_end_though_the_urgent_never_cease() -> None:
    """G05: who has waited longer by the ageing than an urgent one ranks before it."""
    world = local_world(40, max_num_seqs=1, priority_ageing_s=10.0)  # a second between two arrivals
    low = world.arrive(numbers(4), priority=1, max_tokens=3)
    world.step()
    num_urgent = 0
    while low.status is not Status.FINISHED:
        world.arrive(numbers(4, 100), max_tokens=3)
        num_urgent += 1
        world.step()
        assert num_urgent < 10 * 3 + 10
    assert low.num_preemptions == 1, "by the first that came"
    world.finish_all()


def test_without_ageing_the_urgent_go_before_however_long_others_have_waited() -> None:
    world = local_world(40, max_num_seqs=1, priority_ageing_s=0.0)
    low = world.arrive(numbers(4), priority=1, max_tokens=3)
    for _ in range(200):
        world.arrive(numbers(4, 100), max_tokens=1)
        world.step()
    assert (low.status, low.num_preemptions, low.num_output_tokens) == (Status.WAITING, 0, 0)


def test_one_that_has_waited_for_long_is_displaced_no_more() -> None:
    """G05: though its priority is lower."""
    world = local_world(40, max_num_seqs=1, priority_ageing_s=2.0)
    low = world.arrive(numbers(4), priority=1, max_tokens=20)
    world.step()
    for i in range(3):
        world.scheduler.add(make_sequence(numbers(4, 100), number=3 + i))
    assert world.scheduler.plan().preempted == ()
    assert low.status is Status.RUNNING


def test_a_start_leaves_the_watermark_free_for_those_above_it() -> None:
    world = local_world(20, watermark=0.25)
    running, held_back = world.arrive(numbers(39), max_tokens=20), world.arrive(numbers(20, 100), max_tokens=20)
    world.step()
    assert held_back.status is Status.WAITING
    assert world.pool.num_free == 10
    run_until_done(world, running)
    world.step()
    assert held_back.status is Status.RUNNING


def test_the_oldest_never_waits_for_the_watermark() -> None:
    world = local_world(20, watermark=0.9)
    alone = world.arrive(numbers(60), max_tokens=20)
    world.step()
    assert alone.status is Status.RUNNING


def test_no_one_passes_another_in_the_queue() -> None:
    world = local_world(10)
    first = world.arrive(numbers(30), max_tokens=4)
    world.step()
    large, small = world.arrive(numbers(20, 100), max_tokens=4), world.arrive(numbers(2, 200), max_tokens=4)
    world.step()
    assert large.status is small.status is Status.WAITING
    run_until_done(world, first)
    world.step()
    assert large.status is small.status is Status.RUNNING


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_an_abort_gives_every_block_back_in_every_state(num_steps) -> None:
    world = local_world(20, max_num_batched_tokens=8)
    run_until_done(world, world.arrive(numbers(9), max_tokens=1))
    sequence = world.arrive(numbers(20), max_tokens=4)
    for _ in range(num_steps):
        world.step()
    world.cancel(sequence)
    world.cancel(sequence)
    world.check()
    assert sequence.status is Status.FINISHED
    assert world.pool.counts().owned == 0
    assert world.step().is_empty


# --- the prefill node's rule


def test_a_prompt_on_a_prefill_node_holds_all_its_blocks_from_its_first_chunk_on() -> None:
    """B01, A07: the offer names them, and they stay pinned when the prompt is done."""
    world = prefill_world(5, max_num_batched_tokens=8)
    sequence = world.arrive(numbers(20), max_tokens=1000)
    (start,) = world.step().admitted
    assert start.num_new_blocks == 5
    run_until_done(world, sequence)
    assert world.pool.counts().owned == 5
    next_one = world.arrive(numbers(4, 100))
    assert world.step().is_empty
    world.unpin(sequence)
    world.step()
    assert next_one.status is Status.FINISHED
    world.finish_all()


def test_a_prefill_node_refuses_only_prompts_that_do_not_fit() -> None:
    world = prefill_world(5)
    world.arrive(numbers(20), max_tokens=1000)
    with pytest.raises(TooLarge, match="up to 6 KV blocks"):
        world.arrive(numbers(21), max_tokens=1)


def test_two_prompts_in_a_pool_for_little_more_than_one_both_finish() -> None:
    """B01: neither holds a half of what it needs while it waits for the rest."""
    world = prefill_world(6, max_num_batched_tokens=8)
    sequences = [world.arrive(numbers(20, 100 * i)) for i in range(2)]
    world.finish_all()
    assert all((s.status, s.num_computed_tokens) == (Status.FINISHED, 20) for s in sequences)
