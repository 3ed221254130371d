"""The KV blocks of one node as numbers: who holds which, which can be found by content, which may be taken.

Knows no tensor and no sequence. Owned by the engine thread; every operation is O(1) a block. The life of a block:

                     allocate                  publish (once it is full)
             FREE ------------> OWNED, unnamed ----------> OWNED, named <-----------+
              ^ ^                 |      ^                    |                     |
              | |  last release   |      |                    | last release        | acquire
              | +-----------------+      | allocate           v                     | (a prefix hit)
              |                   |      +------------- CACHED, evictable ----------+
              |  end_quarantine   | quarantine           least recently used first
              +-- QUARANTINED <---+

OWNED: one or more references; every table that names a block and every transfer that pins it holds one of its own.
QUARANTINED: given up by its owner, but a remote write may still reach it.
Always free + cached + owned + quarantined = total.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.errors import ResourceExhausted

MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Every block of a pool, by what it is."""

    total: int
    free: int
    cached: int  # unreferenced, but found by its hash until it is evicted
    owned: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found under this hash from now on."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """Nothing is found under this hash any more."""

    block_hash: bytes


BlockEvent = BlockStored | BlockEvicted


class BlockPool:
    """Reference counts, prefix cache and LRU eviction over `num_blocks` blocks."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._found: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest
        self._cached: OrderedDict[int, None] = OrderedDict()  # next to be evicted first
        self._quarantined: set[int] = set()
        self._events: deque[BlockEvent] = deque(maxlen=MAX_EVENTS)
        self._num_lost_events = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: the free, and the cached that nobody references."""
        return len(self._free) + len(self._cached)

    def num_references(self, block_id: int) -> int:
        return self._references[block_id]

    def counts(self) -> BlockCounts:
        free, cached, quarantined = len(self._free), len(self._cached), len(self._quarantined)
        owned = self.num_blocks - free - cached - quarantined
        return BlockCounts(self.num_blocks, free, cached, owned, quarantined)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is all here. Changes nothing, not even the LRU order."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._found.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def found_hashes(self) -> list[bytes]:
        """Every hash that a block can be found under."""
        return list(self._found)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these owned or cached blocks."""
        for block_id in block_ids:
            assert 0 <= block_id < self.num_blocks, f"no block {block_id}"
            if self._references[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is acquired, but neither owned nor cached"
                del self._cached[block_id]
            self._references[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks for the caller, one reference each, evicting the least recently used where none is free.

        Raises: ResourceExhausted, having taken none, where `num_free` is less.
        """
        if num_blocks > self.num_free:
            raise ResourceExhausted(f"{num_blocks} KV blocks wanted, {self.num_free} of {self.num_blocks} can be had")
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def release(self, block_ids: Seq[int]) -> None:
        """Take one reference from each of these blocks, given in order of position.

        The tail of a prefix becomes older in the LRU order than its head, without which it could not be found.
        """
        for block_id in reversed(block_ids):
            assert 0 <= block_id < self.num_blocks, f"no block {block_id}"
            assert self._references[block_id] > 0, f"block {block_id} is released once too often"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Let an owned block, full and final, be found. Where another has this hash already, the older stays."""
        assert self._references[block_id] > 0, f"block {block_id} is published, but nobody owns it"
        if not self.prefix_caching or block_hash in self._found:
            return
        assert self._hashes[block_id] is None, f"block {block_id} is published under two hashes"
        self._hashes[block_id] = block_hash
        self._found[block_hash] = block_id
        self._record(BlockStored(block_hash))

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Give up blocks that only the caller owns and that a remote write may still reach: nobody gets them."""
        for block_id in block_ids:
            assert self._references[block_id] == 1, f"block {block_id} goes to quarantine, but is not owned by one"
            assert self._hashes[block_id] is None, f"block {block_id} goes to quarantine, but can be found"
            self._references[block_id] = 0
            self._quarantined.add(block_id)

    def end_quarantine(self, block_ids: Iterable[int]) -> None:
        """No write can reach these blocks any more: they are free."""
        for block_id in block_ids:
            assert block_id in self._quarantined, f"block {block_id} leaves quarantine, but is not in it"
            self._quarantined.remove(block_id)
            self._free.append(block_id)

    def drain_events(self) -> tuple[list[BlockEvent], int]:
        """What was stored and evicted since the last call, in order, and how many older events were lost.

        At most MAX_EVENTS are kept; who is told of a loss has to start from nothing.
        """
        events, num_lost = list(self._events), self._num_lost_events
        self._events.clear()
        self._num_lost_events = 0
        return events, num_lost

    def check_integrity(self) -> None:
        """Raises: AssertionError, with the block, where the pool contradicts itself. O(blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block_id, (references, block_hash) in enumerate(zip(self._references, self._hashes, strict=True)):
            is_cached = block_id in self._cached
            num_places = (block_id in free) + is_cached + (block_id in self._quarantined)
            state = f"block {block_id}: {references} references, {num_places} places, {block_hash=}"
            assert references >= 0, state
            assert num_places == (references == 0), state
            assert block_hash is not None or not is_cached, f"{state}: cached without a hash"
            assert block_hash is None or is_cached or references, f"{state}: neither cached nor owned"
            assert block_hash is None or self._found.get(block_hash) == block_id, f"{state}: cannot be found"
        assert len(self._found) == sum(block_hash is not None for block_hash in self._hashes), "a stale hash"

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._found[block_hash]
        self._hashes[block_id] = None
        self._record(BlockEvicted(block_hash))
        return block_id

    def _record(self, event: BlockEvent) -> None:
        self._num_lost_events += len(self._events) == MAX_EVENTS
        self._events.append(event)


class Ledger:
    """What a plan would leave of a pool, without touching it: the same verbs, counted on paper.

    Right as long as the plan, when it is carried out, releases first, then acquires, then allocates: then no block that
    it acquires can be evicted for one that it allocates.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_free = pool.num_free  # below zero: the plan does not fit
        self._pool = pool
        self._changes: dict[int, int] = {}  # of reference counts

    def acquire(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            change = self._changes.get(block_id, 0)
            self.num_free -= self._pool.num_references(block_id) + change == 0
            self._changes[block_id] = change + 1

    def release(self, block_ids: Iterable[int]) -> int:
        """Returns how many of the blocks nobody would hold any more."""
        num_freed = 0
        for block_id in block_ids:
            change = self._changes.get(block_id, 0) - 1
            num_freed += self._pool.num_references(block_id) + change == 0
            self._changes[block_id] = change
        self.num_free += num_freed
        return num_freed

    def allocate(self, num_blocks: int) -> None:
        """Blocks that are new to the plan; a negative number takes them out of it again."""
        self.num_free -= num_blocks
