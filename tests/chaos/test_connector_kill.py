"""Nodes that are killed or frozen in mid-transfer, as processes of their own."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import peer_process
from support.connector import Side, assert_no_threads, handover, needs_ucx, wait_until
from support.peer_process import COMMON, DIGEST, FOREVER, KEY, LAYOUT, NUM_TOKENS, UNLIKE, make_offer, make_region

from kvrelay.connector.base import (
    Expectation,
    Failed,
    FailReason,
    GrantedRange,
    GrantPlan,
    Landed,
    Offered,
    Quarantined,
    Released,
    SessionLost,
    SessionUp,
    TokenRange,
)
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.engine.request import RequestKey

pytestmark = pytest.mark.chaos
AT_ONCE_S = 2.0  # seen: milliseconds; the lease alone would take five seconds


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, str(Path(peer_process.__file__)), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(params=["shm", "tcp", "zmq", pytest.param("ucx", marks=needs_ucx)])
def transport(request):
    return request.param


def make_decode_side(transport, epoch, layout):
    region, region_fd = make_region(transport)
    d = Side(region)
    common = COMMON | {"layout": layout}
    d.connector = make_receiver(
        region=region, region_fd=region_fd, epoch=epoch, wake_up=d.woken.set, transport=transport, **common
    )
    return d


def make_prefill_side(transport, epoch):
    p = Side(np.ones((10, LAYOUT.block_bytes), np.uint8))
    p.connector = make_sender(region=p.region, epoch=epoch, wake_up=p.woken.set, transport=transport, **COMMON)
    return p


def expect_and_grant(d, peer_epoch, layout, key=KEY):
    d.connector.expect(
        Expectation(key=key, peer_epoch=peer_epoch, num_tokens=NUM_TOKENS, token_digest=DIGEST, deadline=FOREVER)
    )
    d.wait(Offered, key)
    d.connector.grant(key, GrantPlan((GrantedRange(0, NUM_TOKENS, tuple(range(NUM_TOKENS // layout.block_size))),)))


@contextlib.contextmanager
def decode_side(transport, layout=LAYOUT):
    """D in this process, P in another, and a transfer half-way."""
    d = make_decode_side(transport, "d", layout)
    with process(transport, "prefill", "p", "d", d.connector.address()) as child:
        d.wait(SessionUp)
        expect_and_grant(d, "p", layout)
        wait_until(lambda: d.region[: 20 // layout.block_size].all())
        yield d, child
    d.connector.close()
    assert_no_threads()


def kill(side, child, reasons):
    """The other half, in the middle of its transfer; `side` knows at once, and holds nothing of it."""
    child.kill()
    killed_at = time.monotonic()
    assert side.wait(Failed, KEY).reason in reasons
    side.wait(Released, KEY)
    side.wait(SessionLost)
    assert time.monotonic() - killed_at < AT_ONCE_S


def hand_off(p, d, p_epoch, d_epoch, layout):
    """A whole transfer between these two, into the blocks of the one before; after it nothing is held."""
    key = RequestKey("next", 0)
    p.seen.clear()
    d.seen.clear()
    d.region[:] = 0
    p.connector.connect(d_epoch, d.connector.address())
    p.wait(SessionUp)
    d.wait(SessionUp)
    p.connector.offer(make_offer(d_epoch, key))
    expect_and_grant(d, p_epoch, layout, key)
    p.connector.push(key, TokenRange(0, NUM_TOKENS))
    p.connector.commit(key, handover())
    d.wait(Landed, key)
    p.wait(Released, key)
    num_blocks = NUM_TOKENS // layout.block_size
    assert (d.region[:num_blocks] == 1).all()
    assert not d.region[num_blocks:].any()
    for side in (p, d):
        statistics = side.connector.statistics()
        assert not statistics.states
        assert statistics.num_quarantined_blocks == 0


def test_a_killed_prefill_node_is_noticed_at_once_and_its_transfer_ended(transport):
    """B06."""
    with decode_side(transport) as (d, child):
        kill(d, child, (FailReason.PEER_LOST, FailReason.DATA_FAILED))
        assert d.region[:5].all()  # what P had written
        assert not d.region[5:].any()


@pytest.mark.slow
def test_a_frozen_prefill_node_is_lost_by_its_lease_and_told_so_when_it_thaws(transport):
    """A06: what a frozen P could write into stays out of use until it thaws, or is gone."""
    with decode_side(transport) as (d, child):
        child.send_signal(signal.SIGSTOP)
        assert d.wait(Failed, KEY).reason == FailReason.PEER_LOST
        if transport == "shm":
            d.wait(Quarantined, KEY)
            assert d.connector.statistics().num_quarantined_blocks == 10
            assert not d.of(Released, KEY)
        else:
            d.wait(Released, KEY)
        child.send_signal(signal.SIGCONT)
        d.wait(Released, KEY)
        d.wait(SessionUp, count=2)
        assert d.connector.statistics().num_quarantined_blocks == 0


@pytest.mark.slow
def test_a_prefill_node_that_is_killed_while_it_is_frozen_gives_the_blocks_back():
    """A06: with the kernel's word alone."""
    with decode_side("shm") as (d, child):
        child.send_signal(signal.SIGSTOP)
        d.wait(Quarantined, KEY)
        child.kill()
        d.wait(Released, KEY)


def test_a_killed_decode_node_is_noticed_at_once_and_its_transfer_ended(transport):
    """B06."""
    p = make_prefill_side(transport, "p")
    with process(transport, "decode", "d", "p") as child:
        p.connector.connect("d", child.stdout.readline().strip())
        p.wait(SessionUp)
        p.connector.offer(make_offer("d"))
        p.connector.push(KEY, TokenRange(0, 20))
        wait_until(lambda: p.connector.statistics().num_bytes == 5 * LAYOUT.block_bytes)
        kill(p, child, (FailReason.PEER_LOST, "WRITE_FAILED"))
    p.connector.close()
    assert_no_threads()


def test_a_killed_prefill_node_whose_blocks_are_unlike_ds_holds_none_of_them(transport):
    """B06: killed between two of D's blocks, which it makes of its own; the next P writes into the same ones."""
    with decode_side(transport, UNLIKE) as (d, child):
        kill(d, child, (FailReason.PEER_LOST, FailReason.DATA_FAILED))
        assert d.region[:2].all()  # the 16 tokens of which whole blocks of D can be made
        assert not d.region[2:].any()
        p = make_prefill_side(transport, "p2")
        hand_off(p, d, "p2", "d", UNLIKE)
        p.connector.close()


def test_a_killed_decode_node_whose_blocks_are_unlike_ps_holds_nothing_of_the_staging(transport):
    """B06: what had been packed for it is free for the next D of the same layout, and so are P's own blocks."""
    p = make_prefill_side(transport, "p")
    with process(transport, "decode", "d", "p", "unlike") as child:
        p.connector.connect("d", child.stdout.readline().strip())
        p.wait(SessionUp)
        p.connector.offer(make_offer("d"))
        p.connector.push(KEY, TokenRange(0, 20))
        wait_until(lambda: p.connector.statistics().num_bytes == 2 * UNLIKE.block_bytes)
        kill(p, child, (FailReason.PEER_LOST, "WRITE_FAILED"))
    (staging,) = p.connector._stagings.values()
    assert staging.slots.num_free() == len(staging.staging)
    d = make_decode_side(transport, "d2", UNLIKE)
    hand_off(p, d, "p", "d2", UNLIKE)
    assert staging.slots.num_free() == len(staging.staging)
    p.connector.close()
    d.connector.close()
    assert_no_threads()
