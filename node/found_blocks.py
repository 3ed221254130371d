"""What a node's prefix cache holds, as its routers are told of it."""

from kvrelay.engine.block_hash import short_name
from kvrelay.engine.block_pool import BlockPool, BlockStored
from kvrelay.engine.legs import CacheChange


def take_change(pool: BlockPool) -> CacheChange | None:
    """What the pool's events since the last call come to; None: nothing. Where events were lost, from nothing."""
    events, num_lost = pool.drain_events()
    if num_lost:
        return CacheChange(from_nothing=True, stored=frozenset(map(short_name, pool.found_hashes())))
    if not events:
        return None
    # The last event of each block counts.
    is_found = {short_name(event.block_hash): isinstance(event, BlockStored) for event in events}
    stored = frozenset(name for name, found in is_found.items() if found)
    return CacheChange(evicted=frozenset(is_found.keys() - stored), stored=stored)


class FoundBlocks:
    """All that the prefix cache holds, by the changes so far, for routers that join later."""

    def __init__(self) -> None:
        self._names: set[int] = set()

    def apply(self, change: CacheChange) -> None:
        change.apply_to(self._names)

    def whole(self) -> CacheChange:
        """As a change from nothing."""
        return CacheChange(from_nothing=True, stored=frozenset(self._names))
