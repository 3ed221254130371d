"""What routers know of a node's prefix cache, beside what is really found there: through the wire, whatever happens."""

from collections import deque
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.connector.base import ConnectorStatistics
from kvrelay.engine import block_pool
from kvrelay.engine.block_hash import block_hashes, short_name
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.legs import CacheChange, Load
from kvrelay.node import wire
from kvrelay.node.found_blocks import FoundBlocks, take_change
from kvrelay.node.report import Snapshot
from kvrelay.proto import node_pb2
from kvrelay.router import node_wire
from kvrelay.router.prefix_index import PrefixIndex, PromptBlocks

BLOCK_SIZE, MAX_EVENTS, MAX_NAMES = 2, 5, 3
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=9)


@dataclass
class Router:
    """One router: what is on its way to it, and what it knows."""

    index: PrefixIndex
    messages: deque[bytes] = field(default_factory=deque)


class CacheMachine(RuleBasedStateMachine):
    """A pool on its engine thread, reports on their way to the event loop, messages on their way to routers, which come
    and go. The pool keeps few events, and a message has room for few names."""

    routers: list[Router]

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.patches = patch.object(block_pool, "MAX_EVENTS", MAX_EVENTS), patch.object(wire, "_MAX_NAMES", MAX_NAMES)
        for patched in self.patches:
            patched.start()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.reports: deque[CacheChange | None] = deque()
        self.found_blocks = FoundBlocks()
        self.routers = []

    def teardown(self) -> None:
        if not hasattr(self, "patches"):
            return
        try:
            self.read_everything()
        finally:
            for patched in self.patches:
                patched.stop()

    # --- the engine thread

    @rule(token_ids=PROMPTS)
    def compute(self, token_ids: list[int]) -> None:
        """A prompt that takes what is cached, evicts for the rest, and leaves all of it in the cache."""
        hashes = block_hashes(token_ids, BLOCK_SIZE)
        cached = self.pool.lookup(hashes)
        self.pool.acquire(cached)
        num_new = min(len(hashes) - len(cached), self.pool.num_free)
        table = [*cached, *self.pool.allocate(num_new)]
        for block_id, block_hash in zip(table, hashes, strict=False):
            self.pool.publish(block_id, block_hash)
        self.pool.release(table)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        self.pool.release(self.pool.allocate(int(share * self.pool.num_free)))

    @rule()
    def report(self) -> None:
        self.reports.append(take_change(self.pool))

    # --- the event loop, and the routers

    @precondition(lambda self: self.reports)
    @rule()
    def serve_report(self) -> None:
        change = self.reports.popleft()
        if change is not None:
            self.found_blocks.apply(change)
        for router in self.routers:
            self.send(router, change)

    @precondition(lambda self: len(self.routers) < 3)
    @rule()
    def register(self) -> None:
        self.routers.append(Router(PrefixIndex(self.pool.num_blocks)))
        self.send(self.routers[-1], self.found_blocks.whole())

    @precondition(lambda self: self.routers)
    @rule(data=st.data())
    def lose(self, data) -> None:
        del self.routers[data.draw(st.integers(0, len(self.routers) - 1))]

    @precondition(lambda self: any(router.messages for router in self.routers))
    @rule(data=st.data())
    def read(self, data) -> None:
        self.receive(data.draw(st.sampled_from([router for router in self.routers if router.messages])))

    @rule()
    def read_everything(self) -> None:
        """Nothing is on its way any more: every router knows what the pool finds, of any prompt too."""
        self.report()
        while self.reports:
            self.serve_report()
        for router in self.routers:
            while router.messages:
                self.receive(router)
            assert router.index.names == set(map(short_name, self.pool.found_hashes()))
            for bits in range(2**6):
                prompt = [bits >> i & 1 for i in range(6)]
                found = self.pool.lookup(block_hashes(prompt, BLOCK_SIZE))
                assert router.index.num_cached_blocks(PromptBlocks(prompt).names(BLOCK_SIZE)) == len(found)
        assert take_change(self.pool) is None

    def send(self, router: Router, change: CacheChange | None) -> None:
        transfers = ConnectorStatistics(states={}, sessions={})
        snapshot = Snapshot(blocks=self.pool.counts(), load=Load(), transfers=transfers)
        for message in wire.write_step((), snapshot, change):
            cache = message.step.cache
            assert len(cache.evicted) + len(cache.stored) <= MAX_NAMES
            router.messages.append(message.SerializeToString())

    def receive(self, router: Router) -> None:
        step = node_pb2.NodeMessage.FromString(router.messages.popleft()).step
        if step.HasField("cache"):
            router.index.apply(node_wire.read_cache_change(step.cache))


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
test_every_router_knows_what_the_pool_finds = CacheMachine.TestCase
