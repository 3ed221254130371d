"""The block pool beside a model of it that is too simple to be wrong."""

from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.engine.block_hash import block_hashes
from kvrelay.engine.block_pool import BlockCounts, BlockEvent, BlockEvicted, BlockPool, BlockStored, Ledger

BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Table:
    """What somebody holds: blocks in order of position, and the names of the full ones."""

    block_ids: list[int]
    hashes: list[bytes] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and give back; `stamps` says when a block was last let go of."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.tables: list[Table] = []
        self.quarantined: list[int] = []
        self.names: dict[int, bytes] = {}
        self.stamps: dict[int, int] = {}
        self.events: list[BlockEvent] = []
        self.now = 0

    # --- the model's view

    def references(self, block_id: int) -> int:
        return sum(block_id in table.block_ids for table in self.tables)

    def unheld(self) -> set[int]:
        return {b for b in range(self.pool.num_blocks) if self.references(b) == 0 and b not in self.quarantined}

    def cached(self) -> list[int]:
        """Next to be evicted first."""
        return sorted((b for b in self.unheld() if b in self.names), key=self.stamps.__getitem__)

    def found(self, hashes: list[bytes]) -> list[int]:
        by_name = {name: block_id for block_id, name in self.names.items()}
        longest = next((i for i, name in enumerate(hashes) if name not in by_name), len(hashes))
        return [by_name[name] for name in hashes[:longest]]

    def take(self, num_blocks: int) -> list[int]:
        """Allocate, and compare what was evicted for it."""
        free, cached = self.unheld() - set(self.cached()), self.cached()
        block_ids = self.pool.allocate(num_blocks)
        num_evicted = max(0, num_blocks - len(free))
        assert set(block_ids) == (set(block_ids) & free) | set(cached[:num_evicted])
        assert len(set(block_ids)) == num_blocks
        for block_id in cached[:num_evicted]:
            self.events.append(BlockEvicted(self.names.pop(block_id)))
        return block_ids

    # --- what may happen

    @rule(token_ids=TOKENS, salt=st.sampled_from(["", "salt"]))
    def start_table(self, token_ids: list[int], salt: str) -> None:
        hashes = block_hashes(token_ids, BLOCK_SIZE, salt)
        cached = self.pool.lookup(hashes)
        assert cached == self.found(hashes)
        ledger = Ledger(self.pool)
        ledger.acquire(cached)
        num_new = -(-len(token_ids) // BLOCK_SIZE) - len(cached)
        ledger.allocate(num_new)
        if ledger.num_free < 0:
            return
        self.pool.acquire(cached)
        self.tables.append(Table(cached, hashes))
        self.tables[-1].block_ids = [*cached, *self.take(num_new)]
        assert self.pool.num_free == ledger.num_free

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take_unnamed(self, data) -> None:
        """Blocks without content: pressure on the cache."""
        self.tables.append(Table(self.take(data.draw(st.integers(1, self.pool.num_free)))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block_id, name in zip(table.block_ids, table.hashes, strict=False):
            if name not in self.names.values():
                self.names[block_id] = name
                self.events.append(BlockStored(name))
            self.pool.publish(block_id, name)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.acquire(table.block_ids)
        self.tables.append(Table(list(table.block_ids), table.hashes))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        ledger = Ledger(self.pool)
        ledger.release(table.block_ids)
        self.pool.release(table.block_ids)
        for block_id in reversed(table.block_ids):
            self.now += 1
            self.stamps[block_id] = self.now
        assert self.pool.num_free == ledger.num_free

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def quarantine(self, data) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables[index]
        if any(self.references(b) > 1 or b in self.names for b in table.block_ids):
            return
        del self.tables[index]
        self.pool.quarantine(table.block_ids)
        self.quarantined += table.block_ids

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(self.quarantined)
        self.quarantined = []

    @rule()
    def drain_events(self) -> None:
        assert self.pool.drain_events() == (self.events, 0)
        self.events = []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        num_cached, num_unheld = len(self.cached()), len(self.unheld())
        num_owned = sum(self.references(b) > 0 for b in range(self.pool.num_blocks))
        assert self.pool.num_free == num_unheld
        assert self.pool.counts() == BlockCounts(
            total=self.pool.num_blocks,
            free=num_unheld - num_cached,
            cached=num_cached,
            owned=num_owned,
            quarantined=len(self.quarantined),
        )
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_references(block_id) == self.references(block_id)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_the_pool_agrees_with_a_naive_model = PoolMachine.TestCase
