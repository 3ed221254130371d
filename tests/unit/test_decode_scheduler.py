"""The remote-KV gate, case by case; `support.scheduling.World` checks every step besides. Block size is 4."""

import pytest
from support.scheduling import World, decode_world

from kvrelay.connector.base import GrantedRange, GrantPlan
from kvrelay.engine.block_hash import block_hashes
from kvrelay.engine.errors import TooLarge
from kvrelay.engine.request import Sequence, Status


def numbers(length: int, first: int = 0) -> range:
    """A prompt that shares no block with one of another `first`."""
    return range(first, first + length)


def granted(world: World, prompt: range, **options) -> Sequence:
    """A sequence that was called, offered and granted."""
    sequence = world.arrive(prompt, remote=True, **options)
    world.offer(sequence)
    plan = world.step()
    assert [start.sequence for start in plan.grants] == [sequence]
    return sequence


def warm(world: World, prompt: range) -> None:
    """Leave the full blocks of a prompt in the prefix cache."""
    sequence = granted(world, prompt)
    world.land(sequence)
    world.cancel(sequence)


# --- what a grant is


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_grant_names_the_prompt_s_blocks_and_has_room_for_one_token_more(length) -> None:
    world = decode_world(20)
    sequence = granted(world, numbers(length))
    num_blocks = -(-length // 4)
    assert world.remote[sequence] == GrantPlan((GrantedRange(0, length, tuple(sequence.block_table[:num_blocks])),))
    assert len(sequence.block_table) == -(-(length + 1) // 4)


@pytest.mark.parametrize("length", [11, 12, 13, 19, 20, 21])
@pytest.mark.parametrize("cached_length", [3, 4, 5, 7, 8, 9, 12, 20])
def test_only_what_the_cache_lacks_is_granted_by_absolute_position(length, cached_length) -> None:
    """A01, A03: block i holds tokens [4i, 4i + 4), whatever the cache held and wherever the prompt ends."""
    world = decode_world(40)
    warm(world, numbers(cached_length))
    sequence = granted(world, numbers(length))
    start = min(length // 4, cached_length // 4) * 4
    assert sequence.num_cached_tokens == start
    if start == length:
        assert world.remote[sequence].ranges == ()
    else:
        (piece,) = world.remote[sequence].ranges
        assert (piece.start, piece.end) == (start, length)
        assert list(piece.block_ids) == sequence.block_table[start // 4 : -(-length // 4)]
    world.land(sequence)
    world.finish_all()


def test_a_prompt_that_is_all_cached_is_granted_no_range_and_gives_every_block_back() -> None:
    """A02, B02: fifty times the same prompt."""
    world = decode_world(12)
    warm(world, numbers(16))
    for _ in range(50):
        sequence = granted(world, numbers(16), max_tokens=3)
        assert world.remote[sequence] == GrantPlan(())
        world.land(sequence)
        world.finish_all()
        assert world.pool.num_free == 12


def test_a_request_that_can_never_fit_is_refused_when_it_is_called_for() -> None:
    """A17: before the other node has computed anything for it."""
    world = decode_world(5)
    with pytest.raises(TooLarge, match="up to 6 KV blocks of 4 tokens; this node has 5"):
        world.arrive(numbers(10), remote=True, max_tokens=11)
    assert world.scheduler.statistics().num_expected == 0


# --- when it is given


def test_an_offer_is_granted_when_nothing_is_to_be_computed() -> None:
    world = decode_world(20)
    sequence = granted(world, numbers(8))
    assert sequence.status is Status.REMOTE
    assert world.step().is_empty


def test_grants_take_no_token_of_a_step() -> None:
    world = decode_world(60, max_num_batched_tokens=4)
    long = world.arrive(numbers(40))
    world.step()
    offered = [world.arrive(numbers(12, 100 * i), remote=True) for i in range(1, 4)]
    for sequence in offered:
        world.offer(sequence)
    plan = world.step()
    assert [start.sequence for start in plan.grants] == offered
    assert [(row.sequence, row.num_new_tokens) for row in plan.scheduled] == [(long, 4)]


def test_a_local_prompt_that_lacks_only_tokens_of_the_step_keeps_its_room() -> None:
    world = decode_world(20, max_num_batched_tokens=4)
    long, local = world.arrive(numbers(20)), world.arrive(numbers(36, 100))
    large, small = (world.arrive(numbers(n, 100 * n), remote=True, max_tokens=2) for n in (20, 10))
    world.offer(large)
    world.step()
    assert (long.status, local.status, large.status) == (Status.RUNNING, Status.WAITING, Status.WAITING)
    world.cancel(large)
    world.offer(small)
    world.step()
    assert (local.status, small.status) == (Status.WAITING, Status.REMOTE)
    world.finish_all()


def test_an_urgent_grant_may_take_a_seat_while_one_before_it_waits_for_tokens() -> None:
    """G05: the one before it loses nothing, it starts in the next step."""
    world = decode_world(12, max_num_seqs=2, max_num_batched_tokens=3)
    low = world.arrive(numbers(20), priority=1)
    world.step()
    local, remote = world.arrive(numbers(2, 100)), world.arrive(numbers(2, 200), remote=True)
    world.offer(remote)
    plan = world.step()
    assert plan.preempted == (low,)
    assert [start.sequence for start in plan.grants] == [remote]
    assert [row.sequence for row in world.step().scheduled] == [local]
    world.finish_all()


def test_grants_pass_a_local_prompt_only_as_long_as_they_leave_it_a_token_of_a_step() -> None:
    """Else whoever passes lands and takes it, and while there are always some who pass, it waits for ever."""
    world = decode_world(60, max_num_seqs=8, max_num_batched_tokens=4)
    world.arrive(numbers(40))
    world.step()
    local = world.arrive(numbers(4, 100), max_tokens=2)
    offered = [world.arrive(numbers(4, 100 * i), remote=True, max_tokens=40) for i in range(2, 7)]
    for sequence in offered:
        world.offer(sequence)
    assert [start.sequence for start in world.step().grants] == offered[:2]
    for sequence in offered[:2]:
        world.land(sequence)
    while local.status is Status.WAITING:
        plan = world.step()
        assert plan.grants == () or local.status is not Status.WAITING
    assert [start.sequence for start in plan.grants] == offered[2:], "nobody is in front of them any more"
    world.finish_all()


def test_a_local_prompt_is_served_however_many_grants_come_behind_it() -> None:
    """Two running ones take every token of each step, and there is always a grant to take their place."""
    world = decode_world(60, max_num_seqs=8, max_num_batched_tokens=2)
    for i in (1, 2):
        world.land(granted(world, numbers(4, 100 * i), max_tokens=5))
    local = world.arrive(numbers(4), max_tokens=2)
    for i in range(3, 23):
        world.offer(world.arrive(numbers(4, 100 * i), remote=True, max_tokens=5))
        world.step()
        for sequence in list(world.remote):
            world.land(sequence)
    assert local.status is Status.FINISHED


def test_a_grant_that_passes_leaves_the_watermark_free_for_the_one_it_passes() -> None:
    """Both rank before all that run; the one that runs cannot give way, since a transfer holds its blocks too."""
    world = decode_world(20, watermark=0.25, max_num_batched_tokens=4)
    low = world.arrive(numbers(20), priority=1)
    world.step()
    world.pool.acquire(low.block_table)
    world.arrive(numbers(16, 100))  # of 14 free blocks it keeps 5
    large, small = (world.arrive(numbers(n, 1000 * n), remote=True, max_tokens=1) for n in (16, 12))
    world.offer(large)
    assert world.scheduler.plan().grants == ()
    world.cancel(large)
    world.offer(small)
    assert [start.sequence for start in world.scheduler.plan().grants] == [small]


def test_with_no_local_prompt_in_front_grants_take_every_seat() -> None:
    world = decode_world(60, max_num_seqs=8, max_num_batched_tokens=2)
    sequences = [granted(world, numbers(4, 100 * i)) for i in range(8)]
    assert world.scheduler.statistics().num_remote == 8
    for sequence in sequences:
        world.land(sequence)
    world.finish_all()


def test_what_waits_for_kv_counts_towards_max_num_seqs() -> None:
    world = decode_world(40, max_num_seqs=2)
    local, first = world.arrive(numbers(4), max_tokens=40), granted(world, numbers(4, 100))
    second = world.arrive(numbers(4, 200), remote=True)
    world.offer(second)
    world.step()
    assert second.status is Status.WAITING
    world.fail(first)
    world.step()
    assert second.status is Status.REMOTE
    assert local.status is Status.RUNNING


def test_offers_and_local_prompts_stand_in_one_queue_by_arrival() -> None:
    world = decode_world(8)
    first = granted(world, numbers(20), max_tokens=2)
    called, local = world.arrive(numbers(20, 100), remote=True), world.arrive(numbers(20, 200))
    world.offer(called)
    world.step()
    assert (called.status, local.status) == (Status.WAITING, Status.WAITING)
    world.land(first)
    world.step()
    assert first.status is Status.FINISHED
    world.step()
    assert (called.status, local.status) == (Status.REMOTE, Status.WAITING)


def test_what_is_only_called_for_or_granted_holds_up_nobody_behind_it() -> None:
    world = decode_world(20)
    called, remote = world.arrive(numbers(8), remote=True), granted(world, numbers(8, 100))
    local = world.arrive(numbers(8, 200), max_tokens=3)
    for _ in range(3):
        world.step()
    assert local.status is Status.FINISHED
    assert (called.status, remote.status) == (Status.WAITING, Status.REMOTE)


def test_two_prompts_with_room_for_little_more_than_one_are_granted_one_after_the_other() -> None:
    """B01: neither is granted a part."""
    world = decode_world(7)
    first, second = (world.arrive(numbers(20, 100 * i), remote=True, max_tokens=4) for i in range(2))
    world.offer(first)
    world.offer(second)
    world.step()
    assert (first.status, second.status) == (Status.REMOTE, Status.WAITING)
    world.finish_all()


# --- landing


def test_a_landed_sequence_joins_the_next_batch_with_one_token_to_compute() -> None:
    world = decode_world(20)
    local = world.arrive(numbers(8), max_tokens=20)
    sequence = granted(world, numbers(9, 100))
    world.land(sequence)
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (9, 10)
    plan = world.step()
    assert [(row.sequence, row.start, row.end) for row in plan.scheduled] == [(local, 8, 9), (sequence, 9, 10)]


def test_the_landed_come_before_any_start() -> None:
    world = decode_world(20, max_num_batched_tokens=1)
    sequence = granted(world, numbers(4, 100))
    waiting = world.arrive(numbers(4, 200), priority=-1)
    world.land(sequence)
    assert [row.sequence for row in world.step().scheduled] == [sequence]
    assert waiting.status is Status.WAITING


def test_landed_blocks_can_be_found_and_the_older_of_two_stays() -> None:
    world = decode_world(20)
    first, second = granted(world, numbers(8)), granted(world, numbers(8))
    hashes = block_hashes(numbers(8), 4)
    assert world.pool.lookup(hashes) == []
    world.land(second)
    world.land(first)
    assert world.pool.lookup(hashes) == second.block_table[:2]
    assert first.block_table[:2] != second.block_table[:2]
    world.finish_all()


def test_what_is_remote_is_no_victim_even_of_an_urgent_request() -> None:
    """G02."""
    world = decode_world(6)
    remote = granted(world, numbers(20), priority=5, max_tokens=2)
    urgent = world.arrive(numbers(4, 100))
    assert world.step().is_empty
    world.land(remote)
    assert world.step().preempted == (remote,)
    assert urgent.status is Status.RUNNING


def test_a_preempted_landed_sequence_is_recomputed_here() -> None:
    world = decode_world(6)
    old, young = (granted(world, numbers(7, 100 * i), max_tokens=12) for i in range(2))
    world.land(young)
    world.land(old)
    while not young.num_preemptions:
        world.step()
    assert young.status is Status.WAITING
    while young.status is Status.WAITING:
        plan = world.step()
        assert plan.grants == ()
    assert young.status is Status.RUNNING
    world.finish_all()
    assert young.num_output_tokens == 12


def test_a_bad_mixture_of_growing_requests_and_grants_finishes() -> None:
    """B04: room for 512 tokens, four requests of 100 with 200 tokens to come."""
    world = decode_world(128, watermark=0.05)
    sequences = [world.arrive(numbers(100, 1000 * i), remote=i % 2 == 0, max_tokens=200) for i in range(4)]
    for sequence in list(world.expected):
        world.offer(sequence)
    num_tokens, advanced_at = dict.fromkeys(sequences, 0), dict.fromkeys(sequences, 0)
    while live := world.live():
        world.step()
        world.end_transfers()
        for sequence in live:
            if sequence.num_output_tokens > num_tokens[sequence]:
                num_tokens[sequence], advanced_at[sequence] = sequence.num_output_tokens, world.num_steps
            assert world.num_steps - advanced_at[sequence] < 2 * 200, "it stalls"
    assert all(s.num_output_tokens == 200 for s in sequences)
    assert max(s.num_preemptions for s in sequences) < 5
    assert world.num_steps < 4 * 200, "no better than one after the other"


# --- ends without landing


@pytest.mark.parametrize("num_cached", [0, 4, 8])
def test_a_failed_transfer_gives_back_cached_and_new_blocks_alike(num_cached) -> None:
    """B02: the released set is what was taken, not what was used. Two hundred times."""
    world = decode_world(12)
    if num_cached:
        warm(world, numbers(num_cached))
    for _ in range(200):
        world.fail(granted(world, numbers(14)))
        assert world.pool.num_free == 12


def test_blocks_of_an_aborted_transfer_stay_with_it_until_no_write_can_reach_them() -> None:
    """A06: the next request does not get them, however much it wants them."""
    world = decode_world(6)
    sequence = granted(world, numbers(14), max_tokens=2)
    world.cancel(sequence)
    world.cancel(sequence)
    assert sequence.status is Status.FINISHED
    next_one = world.arrive(numbers(14, 100), max_tokens=2)
    assert world.step().is_empty
    world.end_transfer(sequence)
    world.finish_all()
    assert next_one.num_output_tokens == 2


def test_an_aborted_transfer_keeps_no_seat() -> None:
    world = decode_world(20, max_num_seqs=1)
    world.cancel(granted(world, numbers(4)))
    local = world.arrive(numbers(4, 100), max_tokens=1)
    world.step()
    assert local.status is Status.FINISHED


@pytest.mark.parametrize("offered", [False, True])
def test_a_call_that_is_aborted_before_its_grant_leaves_nothing(offered) -> None:
    world = decode_world(20, max_num_seqs=1)
    world.arrive(numbers(4), max_tokens=20)
    world.step()
    sequence = world.arrive(numbers(4, 100), remote=True)
    if offered:
        world.offer(sequence)
        world.step()
    world.cancel(sequence)
    statistics = world.scheduler.statistics()
    assert (statistics.num_expected, statistics.num_waiting, statistics.num_remote) == (0, 0, 0)
    world.finish_all()
