"""A sender and a receiver with pools of their own, for tests: what happened on each side, and who owns what."""

import threading
import time
from functools import partial

import numpy as np
import pytest
from support.fake_transport import FakeNetwork, FakeReader, FakeWriter
from support.faulty_link import FaultyWriter

from kvrelay.connector.base import (
    CancelOutcome,
    EndReason,
    Expectation,
    Failed,
    GrantedRange,
    GrantPlan,
    Handover,
    Landed,
    Offer,
    Offered,
    Released,
    SessionUp,
    TokenRange,
)
from kvrelay.connector.checksum import block_digest, token_digest
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.connector.receiver import Receiver
from kvrelay.connector.sender import Sender
from kvrelay.connector.session import Identity
from kvrelay.connector.transport.inproc import InprocHub
from kvrelay.connector.transport.ucp_library import has_libucp
from kvrelay.engine.clock import FakeClock, MonotonicClock
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import OutputToken, RequestKey
from kvrelay.engine.secret import new_epoch
from kvrelay.engine.shared_memory import SharedMemory

needs_ucx = pytest.mark.skipif(not has_libucp(), reason="there is no libucp here: pip install kvrelay[ucx]")
TRANSPORTS = ("shm", "tcp", "zmq", "inproc", "fake", pytest.param("ucx", marks=needs_ucx))
SOCKET_TRANSPORTS = ("zmq", "tcp")  # whose endpoint is a host:port, and whose bytes a proxy can carry
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 64
PATIENCE_S = 20.0  # a generous deadline for things that take milliseconds
FOREVER = float("inf")


class SteppedClock(FakeClock):
    """A clock that tells its connectors when it has been moved."""

    def __init__(self):
        super().__init__()
        self.connectors = []

    def advance(self, seconds):
        super().advance(seconds)
        for connector in self.connectors:
            connector.wake()


def wait_until(condition, what="the condition", patience_s=PATIENCE_S):
    """For conditions that no event announces: looked at often, with a generous deadline."""
    pause, deadline = threading.Event(), time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {patience_s} s"
        pause.wait(0.002)


class Side:
    """One half, its events so far, and its pool."""

    def __init__(self, region):
        self.region = region
        self.woken = threading.Event()
        self.seen = []
        self.connector = None

    def collect(self):
        self.woken.clear()
        new = self.connector.events()
        self.seen += new
        return new

    def wait(self, kind, key=None, *, count=1):
        """The latest of `count` events of a kind (of this key), as soon as there are so many."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.of(kind, key)) < count:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} for {key}; seen: {self.seen[-8:]}"
            self.woken.wait(left_s)
            self.collect()
        return self.of(kind, key)[-1]

    def of(self, kind, key=None):
        """The events of this kind so far."""
        return [e for e in self.seen if isinstance(e, kind) and (key is None or e.key == key)]


def shared_region(size):
    """A zeroed region, and the memfd that holds it for as long as there is a view of it."""
    memory = SharedMemory.create(size[0] * size[1], "kvrelay-test")
    return np.frombuffer(memory.buffer, np.uint8).reshape(size), memory.descriptor


class Pair:
    """P and D over one transport. Ends with a check that every block came back, once, and that no thread is left."""

    def __init__(
        self,
        transport,
        *,
        clock=None,
        connect=True,
        p=None,
        d=None,
        secret="s3cret",
        layout=LAYOUT,
        d_layout=None,
        faults=None,
        **d_options,
    ):
        """`faults`: between P's connector and its links. `d_options`: further arguments of make_receiver, at each start
        of D."""
        self.transport = transport
        self.faults = faults
        self.clock = clock or MonotonicClock()
        self.hub = InprocHub() if transport == "inproc" else None
        self.network = FakeNetwork() if transport == "fake" else None
        self.named = {} if self.hub or self.network else {"transport": transport}
        rng = np.random.default_rng(7)
        self.layout = layout
        self.d_layout = d_layout or layout
        size = (NUM_BLOCKS, self.d_layout.block_bytes)
        self.p = Side(rng.integers(0, 256, (NUM_BLOCKS, layout.block_bytes), dtype=np.uint8))
        self.d = Side(np.zeros(size, np.uint8))
        self.common = {"layout": layout, "fingerprint": "model", "secret": secret}
        self.d_values = self.common | {"epoch": new_epoch(), "layout": self.d_layout} | (d or {})
        if transport == "shm":
            self.d.region, self.d_values["region_fd"] = shared_region(size)
        self.p_values = self.common | {"epoch": new_epoch()} | (p or {})
        self.d_options = d_options
        self.offered, self.granted = {}, {}
        self.freed_p, self.freed_d = [], []
        self.start_receiver()
        self.start_sender(connect=connect)

    # --- nodes ---

    def start_receiver(self, **ports):
        values = self.d_values
        if self.network is None:
            self.d.connector = make_receiver(
                region=self.d.region,
                wake_up=self.d.woken.set,
                clock=self.clock,
                hub=self.hub,
                **values,
                **self.named,
                **self.d_options,
                **ports,
            )
        else:
            self.d.connector = Receiver(
                Identity(**values),
                self.d.region,
                [FakeReader(self.network, self.d.region)],
                self.clock,
                self.d.woken.set,
                bind="127.0.0.1",
                port=ports.get("control_port", 0),
                advertise="",
            )
        self._tell_clock(self.d.connector)

    def start_sender(self, *, connect=True):
        values = dict(self.p_values)
        if self.network is None:
            self.p.connector = make_sender(
                region=self.p.region,
                wake_up=self.p.woken.set,
                clock=self.clock,
                hub=self.hub,
                **self.named,
                **values,
            )
        else:
            kv_digests = values.pop("kv_digests", False)
            self.p.connector = Sender(
                Identity(**values),
                self.p.region,
                {"fake": partial(FakeWriter, self.network)},
                self.clock,
                self.p.woken.set,
                kv_digests=kv_digests,
            )
        if self.faults is not None:
            writers = self.p.connector._writers
            self.p.connector._writers = {name: FaultyWriter(writers[name], self.faults) for name in writers}
        self._tell_clock(self.p.connector)
        if connect:
            self.connect()

    def connect(self):
        before = len(self.p.of(SessionUp)), len(self.d.of(SessionUp))
        self.sender.connect(self.d_values["epoch"], self.receiver.address())
        self.p.wait(SessionUp, count=before[0] + 1)
        self.d.wait(SessionUp, count=before[1] + 1)

    def _tell_clock(self, connector):
        if isinstance(self.clock, SteppedClock):
            self.clock.connectors.append(connector)

    @property
    def sender(self):
        return self.p.connector

    @property
    def receiver(self):
        return self.d.connector

    # --- one transfer, step by step ---

    def offer(self, name, num_tokens, p_blocks=None, deadline=FOREVER, attempt=0):
        key = RequestKey(name, attempt)
        blocks = tuple(range(-(-num_tokens // self.layout.block_size))) if p_blocks is None else tuple(p_blocks)
        self.offered[key] = blocks
        self.sender.offer(
            Offer(
                key=key,
                peer_epoch=self.d_values["epoch"],
                num_tokens=num_tokens,
                token_digest=digest_of(key, num_tokens),
                block_ids=blocks,
                deadline=deadline,
            )
        )
        return key

    def expect(self, name, num_tokens, deadline=FOREVER, attempt=0, digest=None):
        key = RequestKey(name, attempt)
        self.receiver.expect(
            Expectation(
                key=key,
                peer_epoch=self.p_values["epoch"],
                num_tokens=num_tokens,
                token_digest=digest or digest_of(key, num_tokens),
                deadline=deadline,
            )
        )
        return key

    def grant(self, key, ranges):
        """`ranges`: (start, end, block ids) each."""
        plan = GrantPlan(tuple(GrantedRange(start, end, tuple(ids)) for start, end, ids in ranges))
        self.granted[key] = tuple(block for r in plan.ranges for block in r.block_ids)
        self.receiver.grant(key, plan)

    def push(self, key, start, end, layers=None):
        self.sender.push(key, TokenRange(start, end), layers)

    def commit(self, key, digests=()):
        self.sender.commit(key, handover(digests))

    def cancel_p(self, key, reason=EndReason.CANCELLED):
        outcome = self.sender.cancel(key, reason)
        if outcome is CancelOutcome.FREED:
            self.freed_p.append(key)
        return outcome

    def cancel_d(self, key):
        outcome = self.receiver.cancel(key)
        if outcome is CancelOutcome.FREED:
            self.freed_d.append(key)
        return outcome

    def begin(self, name, num_tokens, ranges, p_blocks=None):
        """Offered, called for and granted; nothing pushed."""
        key = self.offer(name, num_tokens, p_blocks)
        self.expect(name, num_tokens)
        self.d.wait(Offered, key)
        self.grant(key, ranges)
        return key

    def run(self, name, num_tokens, ranges, p_blocks=None):
        """A whole transfer."""
        key = self.begin(name, num_tokens, ranges, p_blocks)
        self.push(key, 0, num_tokens)
        self.commit(key)
        self.d.wait(Landed, key)
        self.p.wait(Released, key)
        return key

    def digests(self, key):
        return tuple(block_digest(self.p.region[block]) for block in self.offered[key])

    def check_bytes(self, key, ranges):
        """D's granted blocks hold what P's blocks of the same positions hold."""
        for start, _end, ids in ranges:
            for i, block in enumerate(ids):
                source = self.offered[key][start // self.layout.block_size + i]
                assert np.array_equal(self.d.region[block], self.p.region[source]), (key, i)

    # --- the end ---

    def close(self):
        self.sender.close()
        self.receiver.close()
        self.p.collect()
        self.d.collect()
        self.check_ownership()
        assert_no_threads()

    def check_ownership(self):
        for key in self.offered:
            assert len(self.p.of(Released, key)) + self.freed_p.count(key) == 1, (key, self.p.seen)
        for key in self.granted:
            ends = len(self.d.of(Released, key)) + len(self.d.of(Landed, key)) + self.freed_d.count(key)
            assert ends == 1, (key, self.d.seen)
        for side in (self.p, self.d):
            for failed in side.of(Failed):
                assert len(side.of(Failed, failed.key)) == 1, failed
        assert not self.sender.statistics().states
        assert not self.receiver.statistics().states
        assert self.receiver.statistics().num_quarantined_blocks == 0
        for staging in self.sender._stagings.values():
            assert staging.slots.num_free() == len(staging.staging), "the staging is not whole again"


def assert_no_threads():
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")], "the end of all threads")


def digest_of(key, num_tokens):
    return token_digest([hash(key) & 0xFFFF, num_tokens])


def handover(digests=()):
    return Handover(
        first_tokens=(OutputToken(choice=0, token_id=42),), num_cached_tokens=3, block_digests=tuple(digests)
    )
