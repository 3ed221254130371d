"""P's staging under a transport that writes when the test says so: who may use a slot, and until when."""

import threading

import numpy as np
import pytest
from support.connector import assert_no_threads, wait_until
from support.unlike import unlike_layouts

from kvrelay.connector import staging
from kvrelay.connector.base import GrantedRange, GrantPlan, TokenRange
from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import GrantId
from kvrelay.connector.plan import RecastPlan
from kvrelay.connector.staging import StagedWriter
from kvrelay.connector.transit import agree_transit
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.request import RequestKey

TRANSIT = agree_transit(*unlike_layouts(4, 8))
NUM_SLOTS = 16
SHARE = 4


class ManualWriter:
    """Writes nothing until `deliver`. Idle on a grant unless `is_inside`."""

    name = "manual"

    def __init__(self, region):
        self.region = region
        self.links = []

    def reaches(self, address):
        return True

    def connect(self, session_nonce, address, events):
        self.links.append(ManualLink(self.region, events))
        return self.links[-1]

    def close(self):
        pass


class ManualLink:
    def __init__(self, region, events):
        self.region, self.events = region, events
        self.queued, self.arrived, self.is_inside = [], {}, False

    def write(self, grant, copies):
        self.queued += [(grant, copy) for copy in copies]

    def deliver(self, index=0):
        grant, copy = self.queued.pop(index)
        self.arrived[grant, copy.target_block] = self.region[copy.source_block, : copy.size].copy()
        self.events.written(grant, copy.size)

    def stop(self, grant):
        self.queued = [(other, copy) for other, copy in self.queued if other != grant]
        return not self.is_inside

    def close(self):
        self.queued.clear()


class Heard:
    """What the sender would hear."""

    def __init__(self):
        self.num_bytes, self.idle = 0, []

    def written(self, grant, num_bytes):
        self.num_bytes += num_bytes

    def writer_idle(self, grant):
        self.idle.append(grant)

    def write_failed(self, session_nonce, reason):
        raise AssertionError(reason)


class Stage:
    """A pool whose blocks each hold their own number, and the staging before a manual transport."""

    def __init__(self):
        self.loop = Loop("kv-pack", MonotonicClock())
        self.loop.start()
        self.region = np.zeros((64, TRANSIT.source.block_bytes), np.uint8)
        self.region[:] = np.arange(64, dtype=np.uint8)[:, None]
        self.writer = StagedWriter(ManualWriter, self.region, TRANSIT, self.loop)

    def connect(self):
        heard = Heard()
        link = self.writer.connect(b"n", "here", heard)
        return link, link.inner, heard

    def write(self, link, name, num_blocks, first_block=0):
        """All of a prompt; D's block i is made of P's blocks 2i and 2i + 1."""
        grant = GrantId(b"n", b"g", RequestKey(name, 0))
        plan = RecastPlan(
            tuple(range(first_block, first_block + 2 * num_blocks)), 8 * num_blocks, TRANSIT, digests=False
        )
        plan.grant(GrantPlan((GrantedRange(0, 8 * num_blocks, tuple(range(num_blocks))),)))
        plan.push(TokenRange(0, 8 * num_blocks), None)
        link.write(grant, plan.take_due())
        return grant

    @property
    def num_free(self):
        return self.writer.slots.num_free()


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr(staging, "STAGING_BYTES", NUM_SLOTS * TRANSIT.target.block_bytes)
    stage = Stage()
    yield stage
    assert stage.num_free == NUM_SLOTS
    assert stage.loop.stop(5.0)
    assert_no_threads()


def check_arrived(link, grant, num_blocks, first_block=0):
    for i in range(num_blocks):
        block = link.arrived[grant, i].reshape(3, 2, 2, 8, -1)
        for half in (0, 1):
            assert (block[:, :, :, 4 * half : 4 * half + 4] == first_block + 2 * i + half).all()


def test_a_slot_is_not_used_again_before_all_of_its_grant_is_written(stage):
    """In whatever order the transport writes; what waits for room goes on when it comes."""
    link, inner, heard = stage.connect()
    grant = stage.write(link, "r", 10)
    for num_here in (SHARE, SHARE, 10 - 2 * SHARE):
        wait_until(lambda n=num_here: len(inner.queued) == n)
        for _ in range(num_here - 1):
            inner.deliver(-1)
            assert stage.num_free == NUM_SLOTS - num_here, "given back too soon"
        inner.deliver()
    check_arrived(inner, grant, 10)
    assert heard.num_bytes == 10 * TRANSIT.block_bytes


def test_a_peer_that_reads_nothing_stops_no_other(stage):
    frozen, inner_frozen, _ = stage.connect()
    lively, inner, heard = stage.connect()
    stuck = stage.write(frozen, "stuck", 12)
    wait_until(lambda: len(inner_frozen.queued) == SHARE)
    for i in range(5):
        grant = stage.write(lively, f"r{i}", 3, first_block=4 * i)
        wait_until(lambda: len(inner.queued) == 3)
        for _ in range(3):
            inner.deliver()
        check_arrived(inner, grant, 3, first_block=4 * i)
    assert len(inner_frozen.queued) == SHARE
    assert frozen.stop(stuck)
    assert heard.num_bytes == 15 * TRANSIT.block_bytes


def test_two_grants_of_a_session_are_written_each_under_its_own(stage):
    link, inner, _ = stage.connect()
    grants = [stage.write(link, f"r{i}", 2, first_block=10 * i) for i in range(3)]
    for _ in range(6):
        wait_until(lambda: inner.queued)
        inner.deliver()
    for i, grant in enumerate(grants):
        check_arrived(inner, grant, 2, first_block=10 * i)


def test_a_stop_is_idle_when_both_the_packing_and_the_transport_are(stage):
    link, inner, heard = stage.connect()
    inner.is_inside = True
    grant = stage.write(link, "r", 2)
    wait_until(lambda: len(inner.queued) == 2)
    assert not link.stop(grant)
    assert stage.num_free == NUM_SLOTS - 2
    inner.events.writer_idle(grant)
    assert heard.idle == [grant]
    assert stage.num_free == NUM_SLOTS


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_stop_while_packing_hands_nothing_more_to_the_transport(stage, is_inside):
    link, inner, heard = stage.connect()
    inside, gate = threading.Event(), threading.Event()
    pack = stage.writer._packer.pack
    stage.writer._packer.pack = lambda *args: (inside.set(), gate.wait(), pack(*args))
    grant = stage.write(link, "r", 2)
    inside.wait()
    inner.is_inside = is_inside
    assert not link.stop(grant)
    assert not heard.idle
    gate.set()
    if is_inside:
        wait_until(lambda: stage.num_free == NUM_SLOTS)
        assert not heard.idle
        inner.events.writer_idle(grant)
    wait_until(lambda: heard.idle == [grant])
    assert not inner.queued
