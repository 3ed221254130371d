"""What a node tells of its prefix cache: the net of its pool's events."""

from kvrelay.engine import block_pool
from kvrelay.engine.block_hash import block_hashes, short_name
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.legs import CacheChange
from kvrelay.node.found_blocks import take_change


def names(prompt: list[int]) -> frozenset[int]:
    return frozenset(map(short_name, block_hashes(prompt, 4)))


def cache(pool: BlockPool, prompt: list[int]) -> None:
    """Leave the blocks of a prompt in the prefix cache, unreferenced."""
    hashes = block_hashes(prompt, 4)
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.release(block_ids)


ONE, OTHER = list(range(8)), list(range(8, 16))


def test_nothing_is_no_change() -> None:
    pool = BlockPool(2, 4)
    pool.release(pool.allocate(2))
    assert take_change(pool) is None
    cache(pool, ONE)
    assert take_change(pool) == CacheChange(stored=names(ONE))
    assert take_change(pool) is None


def test_what_came_and_went_meanwhile_counts_by_its_end() -> None:
    pool = BlockPool(2, 4)
    cache(pool, ONE)
    cache(pool, OTHER)
    assert take_change(pool) == CacheChange(stored=names(OTHER), evicted=names(ONE))
    cache(pool, ONE)
    cache(pool, OTHER)
    assert take_change(pool) == CacheChange(stored=names(OTHER), evicted=names(ONE))


def test_after_a_loss_everything_is_named_anew(monkeypatch) -> None:
    monkeypatch.setattr(block_pool, "MAX_EVENTS", 3)
    pool = BlockPool(4, 4)
    cache(pool, ONE)
    assert take_change(pool) == CacheChange(stored=names(ONE))
    cache(pool, OTHER)
    cache(pool, list(range(16, 24)))
    found = names(OTHER) | names(list(range(16, 24)))
    assert take_change(pool) == CacheChange(from_nothing=True, stored=found)
    assert take_change(pool) is None


def test_a_pool_without_a_prefix_cache_never_changes() -> None:
    pool = BlockPool(2, 4, prefix_caching=False)
    cache(pool, ONE)
    assert take_change(pool) is None
