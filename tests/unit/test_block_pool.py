"""The block pool, case by case."""

import pytest

from kvrelay.engine import block_pool
from kvrelay.engine.block_hash import block_hashes
from kvrelay.engine.block_pool import BlockCounts, BlockEvicted, BlockPool, BlockStored, Ledger
from kvrelay.engine.errors import ResourceExhausted
from kvrelay.engine.kv_layout import blocks_for


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4, 4)


def cache(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Leave the blocks of a prompt in the prefix cache, unreferenced."""
    hashes = block_hashes(token_ids, pool.block_size)
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(block_ids)
    return block_ids


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_every_block_is_counted_in_one_place(pool) -> None:
    cache(pool, [1, 2, 3, 4])
    pool.allocate(1)
    pool.quarantine(pool.allocate(1))
    assert pool.counts() == BlockCounts(total=4, free=1, cached=1, owned=1, quarantined=1)
    assert pool.num_free == 2


def test_a_pool_that_lacks_blocks_says_how_many_and_takes_none(pool) -> None:
    pool.allocate(3)
    with pytest.raises(ResourceExhausted, match="2 KV blocks wanted, 1 of 4 can be had"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_an_unpublished_block_is_free_when_released(pool) -> None:
    pool.release(pool.allocate(2))
    assert pool.counts().free == 4


def test_a_published_block_is_found_while_owned_and_after(pool) -> None:
    (block_hash,) = block_hashes([1, 2, 3, 4], 4)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, block_hash)
    assert pool.lookup([block_hash]) == [block_id]
    pool.release([block_id])
    assert pool.lookup([block_hash]) == [block_id]
    assert pool.counts().cached == 1


def test_lookup_gives_the_longest_prefix_and_stops_at_the_first_gap(pool) -> None:
    hashes = block_hashes(range(12), 4)
    first, _, third = block_ids = pool.allocate(3)
    pool.publish(first, hashes[0])
    pool.publish(third, hashes[2])
    assert pool.lookup(hashes) == [block_ids[0]]


def test_the_tail_of_a_prefix_is_evicted_before_its_head(pool) -> None:
    head, tail = cache(pool, list(range(8)))
    pool.allocate(2)
    assert pool.allocate(1) == [tail]
    assert pool.allocate(1) == [head]


def test_what_was_used_least_recently_is_evicted_first(pool) -> None:
    old, new = cache(pool, [1, 2, 3, 4]), cache(pool, [5, 6, 7, 8])
    pool.acquire(old)
    pool.release(old)
    pool.allocate(2)
    assert pool.allocate(1) == new


def test_free_blocks_are_taken_before_anything_is_evicted(pool) -> None:
    cached = cache(pool, [1, 2, 3, 4])
    assert cached[0] not in pool.allocate(3)
    assert pool.lookup(block_hashes([1, 2, 3, 4], 4)) == cached


def test_an_acquired_block_is_not_evicted(pool) -> None:
    cached = cache(pool, [1, 2, 3, 4])
    pool.acquire(cached)
    pool.allocate(3)
    assert pool.num_free == 0
    assert pool.lookup(block_hashes([1, 2, 3, 4], 4)) == cached


def test_of_two_blocks_with_one_hash_the_older_stays(pool) -> None:
    (block_hash,) = block_hashes([1, 2, 3, 4], 4)
    older, newer = pool.allocate(2)
    pool.publish(older, block_hash)
    pool.publish(newer, block_hash)
    assert pool.lookup([block_hash]) == [older]
    pool.release([newer])
    assert pool.counts().cached == 0
    assert pool.lookup([block_hash]) == [older]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 4, prefix_caching=False)
    cache(pool, [1, 2, 3, 4])
    assert pool.lookup(block_hashes([1, 2, 3, 4], 4)) == []
    assert pool.counts().free == 4
    assert pool.drain_events() == ([], 0)


def test_stores_and_evictions_are_told_in_order(pool) -> None:
    (first,), (second,) = block_hashes([1, 2, 3, 4], 4), block_hashes([5, 6, 7, 8], 4)
    cache(pool, [1, 2, 3, 4])
    cache(pool, [5, 6, 7, 8])
    pool.allocate(4)
    assert pool.drain_events() == (
        [BlockStored(first), BlockStored(second), BlockEvicted(first), BlockEvicted(second)],
        0,
    )
    assert pool.drain_events() == ([], 0)


def test_events_that_nobody_drains_are_bounded_and_their_loss_is_told(monkeypatch) -> None:
    monkeypatch.setattr(block_pool, "MAX_EVENTS", 3)
    pool = BlockPool(8, 1)
    cache(pool, [1, 2, 3, 4, 5])
    events, num_lost = pool.drain_events()
    assert [event.block_hash for event in events] == block_hashes([1, 2, 3, 4, 5], 1)[2:]
    assert num_lost == 2


def test_quarantined_blocks_are_given_to_nobody_until_it_ends(pool) -> None:
    block_ids = pool.allocate(3)
    pool.quarantine(block_ids)
    assert pool.num_free == 1
    pool.end_quarantine(block_ids)
    assert pool.counts() == BlockCounts(total=4, free=4, cached=0, owned=0, quarantined=0)


def _release_twice(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    pool.release(block_ids)


def _acquire_a_free_block(pool: BlockPool) -> None:
    pool.acquire([0])


def _publish_what_nobody_owns(pool: BlockPool) -> None:
    pool.publish(0, b"hash")


def _publish_under_two_hashes(pool: BlockPool) -> None:
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"one")
    pool.publish(block_id, b"two")


def _quarantine_what_is_shared(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.acquire(block_ids)
    pool.quarantine(block_ids)


def _quarantine_what_can_be_found(pool: BlockPool) -> None:
    block_ids = pool.allocate(1)
    pool.publish(block_ids[0], b"hash")
    pool.quarantine(block_ids)


def _end_a_quarantine_that_is_none(pool: BlockPool) -> None:
    pool.end_quarantine(pool.allocate(1))


@pytest.mark.parametrize(
    "misuse",
    [
        _release_twice,
        _acquire_a_free_block,
        _publish_what_nobody_owns,
        _publish_under_two_hashes,
        _quarantine_what_is_shared,
        _quarantine_what_can_be_found,
        _end_a_quarantine_that_is_none,
        lambda pool: pool.acquire([4]),
        lambda pool: pool.acquire([-1]),
        lambda pool: pool.release([4]),
        lambda pool: pool.release([-1]),
    ],
)
def test_our_own_mistakes_are_assertion_errors(pool, misuse) -> None:
    with pytest.raises(AssertionError, match="block"):
        misuse(pool)


def test_a_ledger_counts_what_a_plan_would_leave_and_changes_nothing(pool) -> None:
    cached = cache(pool, list(range(8)))
    owned = pool.allocate(1)
    ledger = Ledger(pool)
    ledger.acquire(cached)
    assert ledger.num_free == 1
    ledger.acquire(cached)
    assert ledger.num_free == 1
    assert ledger.release(owned) == 1
    assert ledger.num_free == 2
    ledger.allocate(3)
    assert ledger.num_free == -1
    assert pool.num_free == 3
    assert pool.num_references(cached[0]) == 0
