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
from support.connector import Side, assert_no_threads, needs_ucx, wait_until
from support.peer_process import COMMON, DIGEST, FOREVER, KEY, LAYOUT, NUM_TOKENS, make_region

from kvrelay.connector.base import (
    Expectation,
    Failed,
    FailReason,
    GrantedRange,
    GrantPlan,
    Offer,
    Offered,
    Quarantined,
    Released,
    SessionLost,
    SessionUp,
    TokenRange,
)
from kvrelay.connector.factory import make_receiver, make_sender

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


@contextlib.contextmanager
def decode_side(transport):
    """D in this process, P in another, and a transfer half-way."""
    region, region_fd = make_region(transport)
    d = Side(region)
    d.connector = make_receiver(
        region=region, region_fd=region_fd, epoch="d", wake_up=d.woken.set, transport=transport, **COMMON
    )
    with process(transport, "prefill", "p", "d", d.connector.address()) as child:
        d.wait(SessionUp)
        d.connector.expect(
            Expectation(key=KEY, peer_epoch="p", num_tokens=NUM_TOKENS, token_digest=DIGEST, deadline=FOREVER)
        )
        d.wait(Offered)
        d.connector.grant(KEY, GrantPlan((GrantedRange(0, NUM_TOKENS, tuple(range(10))),)))
        wait_until(lambda: d.region[:5].all())
        yield d, child
    d.connector.close()
    assert_no_threads()


def test_a_killed_prefill_node_is_noticed_at_once_and_its_transfer_ended(transport):
    """B06."""
    with decode_side(transport) as (d, child):
        child.kill()
        killed_at = time.monotonic()
        assert d.wait(Failed, KEY).reason in (FailReason.PEER_LOST, FailReason.DATA_FAILED)
        d.wait(Released, KEY)
        d.wait(SessionLost)
        assert time.monotonic() - killed_at < AT_ONCE_S
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
    p = Side(np.ones((10, LAYOUT.block_bytes), np.uint8))
    p.connector = make_sender(region=p.region, epoch="p", wake_up=p.woken.set, transport=transport, **COMMON)
    with process(transport, "decode", "d", "p") as child:
        p.connector.connect("d", child.stdout.readline().strip())
        p.wait(SessionUp)
        p.connector.offer(
            Offer(
                key=KEY,
                peer_epoch="d",
                num_tokens=NUM_TOKENS,
                token_digest=DIGEST,
                block_ids=tuple(range(10)),
                deadline=FOREVER,
            )
        )
        p.connector.push(KEY, TokenRange(0, 20))
        wait_until(lambda: p.connector.statistics().num_bytes == 5 * LAYOUT.block_bytes)
        child.kill()
        killed_at = time.monotonic()
        assert p.wait(Failed, KEY).reason in (FailReason.PEER_LOST, "WRITE_FAILED")
        p.wait(Released, KEY)
        p.wait(SessionLost)
        assert time.monotonic() - killed_at < AT_ONCE_S
    p.connector.close()
    assert_no_threads()
