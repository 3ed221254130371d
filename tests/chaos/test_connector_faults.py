"""Every fault of a link, over every transport: a transfer lands with the right bytes, or fails by name on both sides,
and every block comes back (`Pair.close` looks).

Two levels. Between the connector and its link (`support/faulty_link.py`): all transports. In the stream of bytes of a
socket (`bench/proxy.py`), at a place drawn at random: those that have one, control and data apart.

Seen to catch: digests that nobody checks; a failed write that ends no transfer; bytes that count as often as they come.
"""

import contextlib
import os
import random
import sys
from dataclasses import replace

import pytest
from proxy import Break, Fault as StreamFault, Link as StreamLink, Proxy
from support.connector import LAYOUT, SOCKET_TRANSPORTS, TRANSPORTS, Pair, SteppedClock, wait_until
from support.faulty_link import Fault, Faults

from kvrelay.connector.base import (
    CancelOutcome,
    EndReason,
    Failed,
    FailReason,
    Landed,
    Offered,
    RefuseReason,
    Released,
    SessionLost,
    SessionUp,
)

pytestmark = pytest.mark.chaos
B = LAYOUT.block_size
BLOCK = LAYOUT.block_bytes
NUM_TOKENS = 4 * B - 1
RANGES = [(0, NUM_TOKENS, (9, 2, 30, 17))]
P_BLOCKS = (5, 1, 40, 8)
WRONG_BLOCK = 60
DEADLINE_S = 3.0
REASONS = (EndReason, FailReason, RefuseReason)


@pytest.fixture
def seed():
    value = int(os.environ.get("KVRELAY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    sys.stdout.write(f"KVRELAY_SEED={value}\n")
    return value


@pytest.fixture(params=TRANSPORTS)
def pair(request, seed, caplog):
    faults = Faults(rng=random.Random(seed), wrong_block=WRONG_BLOCK)
    pair = Pair(request.param, faults=faults, clock=SteppedClock())
    yield pair
    pair.close()
    assert faults.num_struck, "no fault has struck"
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def begin(pair, name="r"):
    deadline = pair.clock.now() + DEADLINE_S
    key = pair.offer(name, NUM_TOKENS, P_BLOCKS, deadline=deadline)
    pair.expect(name, NUM_TOKENS, deadline=deadline)
    pair.d.wait(Offered, key)
    pair.grant(key, RANGES)
    wait_until(lambda: pair.sender.statistics().states.get("SENDING"))
    return key


def push(pair, key):
    pair.push(key, 0, 2 * B)
    pair.push(key, 2 * B, NUM_TOKENS)
    pair.commit(key, pair.digests(key))


def failed_on_both(pair, key):
    """Both reasons, by name; and both sides' blocks have come back."""
    reasons = [side.wait(Failed, key).reason for side in (pair.p, pair.d)]
    for side in (pair.p, pair.d):
        side.wait(Released, key)
    assert all(isinstance(reason, REASONS) for reason in reasons), reasons
    assert not pair.d.of(Landed, key)
    return reasons


def step_until_seen(pair, kind, *, count=1):
    """Let the clock run until both sides have seen `count` of these."""

    def seen(side):
        pair.clock.advance(0.1)
        side.collect()
        return len(side.of(kind)) >= count

    for side in (pair.p, pair.d):
        wait_until(lambda side=side: seen(side), f"{count} {kind.__name__}")


@pytest.mark.parametrize("fault", [Fault.DOUBLE, Fault.REORDER])
def test_copies_that_go_twice_or_in_another_order_land_once_and_right(pair, fault):
    pair.faults.fault = fault
    key = begin(pair)
    push(pair, key)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)
    pair.check_bytes(key, RANGES)
    assert len(pair.d.of(Landed, key)) == 1


def test_a_copy_with_other_bytes_keeps_the_request_from_starting(pair):
    pair.faults.fault = Fault.CORRUPT
    key = begin(pair)
    push(pair, key)
    assert failed_on_both(pair, key) == [FailReason.REVOKED, FailReason.DATA_FAILED]
    assert pair.d.of(Failed, key)[0].retryable


def test_a_copy_that_is_lost_lands_nothing(pair):
    """Two-sided: D waits for the byte to the deadline. One-sided: the digests tell."""
    pair.faults.fault = Fault.DROP
    key = begin(pair)
    push(pair, key)

    def has_ended():
        pair.d.collect()
        return pair.d.of(Failed, key) or "COMMIT_SEEN" in pair.receiver.statistics().states

    wait_until(has_ended)
    assert not pair.d.of(Landed, key)
    pair.clock.advance(DEADLINE_S)
    assert failed_on_both(pair, key)[1] in (FailReason.DATA_FAILED, FailReason.TIMEOUT, RefuseReason.DEADLINE)


@pytest.mark.parametrize("end", ["release", "cancel on P", "cancel on D", "deadline", "lost session"])
def test_copies_that_stall_go_later_or_end_with_the_transfer(pair, end):
    """A06, A07."""
    pair.faults.fault = Fault.STALL
    key = begin(pair)
    push(pair, key)
    assert pair.faults.links[0].waiting
    if end == "release":
        pair.faults.release()
        pair.d.wait(Landed, key)
        pair.p.wait(Released, key)
        pair.check_bytes(key, RANGES)
        return
    if end == "cancel on P":
        if pair.cancel_p(key) is not CancelOutcome.FREED:
            pair.p.wait(Released, key)
        pair.d.wait(Released, key)
    elif end == "cancel on D":
        if pair.cancel_d(key) is not CancelOutcome.FREED:
            pair.d.wait(Released, key)
        pair.p.wait(Released, key)
    elif end == "deadline":
        pair.clock.advance(DEADLINE_S)
        failed_on_both(pair, key)
    else:
        session = pair.receiver._peers[pair.p_values["epoch"]].session
        pair.receiver._acceptor.close_session(session, "the test cut it")
        step_until_seen(pair, SessionUp, count=2)
        failed_on_both(pair, key)
    before = pair.d.region.copy()
    pair.faults.release()
    assert (pair.d.region == before).all()


@pytest.mark.parametrize("place", ["start", "in a block", "between blocks", "last byte", "drawn"])
def test_a_link_that_dies_at_any_byte_ends_its_transfers_and_the_next_session_works(pair, place):
    places = {"start": 0, "in a block": BLOCK + 7, "between blocks": 2 * BLOCK, "last byte": 4 * BLOCK - 1}
    pair.faults.at_byte = places[place] if place in places else pair.faults.rng.randrange(4 * BLOCK)
    pair.faults.fault = Fault.DIE
    key, other = begin(pair), pair.offer("other", B, (50,))
    push(pair, key)
    step_until_seen(pair, SessionUp, count=2)
    failed_on_both(pair, key)
    pair.p.wait(Released, other)
    pair.faults.release()
    again = begin(pair, "again")
    push(pair, again)
    pair.d.wait(Landed, again)
    pair.p.wait(Released, again)
    pair.check_bytes(again, RANGES)


# --- in the stream ---


@contextlib.contextmanager
def proxied(transport, *, control=None, data=None, clock=None):
    """A pair whose control connection and data connection go through proxies; `control` and `data`: P's way to D."""
    pair = Pair(transport, connect=False, clock=clock)
    with contextlib.ExitStack() as stack:
        proxies = [Proxy(_upstream(pair.receiver.address()), forth=control)]
        for reader in pair.receiver._readers.values():
            proxies.append(Proxy(_upstream(reader.endpoint.address), forth=data))
            reader.endpoint = replace(reader.endpoint, address=proxies[-1].address)
        for proxy in proxies:
            stack.callback(proxy.close)
        stack.callback(pair.close)
        pair.sender.connect(pair.d_values["epoch"], proxies[0].address)
        yield pair, proxies


def _upstream(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def transfer(pair, name, deadline_s):
    """A whole transfer over a link that may break at any moment. Returns: whether it landed; else it has failed."""
    deadline = pair.clock.now() + deadline_s
    key = pair.offer(name, NUM_TOKENS, P_BLOCKS, deadline=deadline)
    pair.expect(name, NUM_TOKENS, deadline=deadline)
    pair.push(key, 0, 2 * B)
    pair.push(key, 2 * B, NUM_TOKENS)
    pair.commit(key, pair.digests(key))

    def serve():
        for event in pair.d.collect():
            if isinstance(event, Offered):
                pair.grant(event.key, RANGES)
        pair.p.collect()
        over_p, over_d = pair.p.of(Released, key), pair.d.of(Landed, key) + pair.d.of(Failed, key)
        return over_p and over_d and (key not in pair.granted or pair.d.of(Landed, key) + pair.d.of(Released, key))

    wait_until(serve)
    if not pair.d.of(Landed, key):
        return False
    pair.check_bytes(key, RANGES)
    return True


@pytest.mark.parametrize("fault", list(StreamFault))
@pytest.mark.parametrize("part", ["start", "middle", "end"])
@pytest.mark.parametrize("transport", SOCKET_TRANSPORTS)
def test_a_data_stream_that_breaks_anywhere_lands_right_or_fails_and_is_made_anew(transport, fault, part, seed, caplog):
    rng = random.Random(seed)
    at = {"start": rng.randrange(200), "middle": rng.randrange(200, 1800), "end": rng.randrange(1800, 3200)}[part]
    broken = StreamLink(broken=Break(fault, at, rng.choice((1, 7, 64))))
    with proxied(transport, data=broken) as (pair, proxies):
        pair.p.wait(SessionUp)
        pair.d.wait(SessionUp)
        landed = transfer(pair, "broken", 0.7)
        assert proxies[1].has_struck or landed
        for proxy in proxies:
            proxy.heal()
        lands_again(pair)
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


@pytest.mark.parametrize("fault", list(StreamFault))
@pytest.mark.parametrize("transport", SOCKET_TRANSPORTS)
def test_a_control_stream_that_breaks_anywhere_gives_every_block_back(transport, fault, seed, caplog):
    """What P says is spoilt, and D holds what it can to it. Bytes may land: a message has no digest of its own."""
    rng = random.Random(seed)
    with proxied(transport) as (pair, proxies):
        pair.p.wait(SessionUp)
        pair.d.wait(SessionUp)
        proxies[0].strike(Break(fault, rng.randrange(150), rng.choice((1, 7, 64))))  # in OFFER or COMMIT
        transfer(pair, "broken", 0.7)
        assert proxies[0].has_struck
        for proxy in proxies:
            proxy.heal()
        lands_again(pair)
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def lands_again(pair):
    """Behind a healed link transfers land, as soon as both have a session: the last may be about to end."""
    tries = iter(range(1000))

    def landed():
        pair.p.collect()
        return transfer(pair, f"healed{next(tries)}", 0.7)

    wait_until(landed, "a transfer over the healed link")


@pytest.mark.parametrize("transport", SOCKET_TRANSPORTS)
def test_a_slow_and_far_link_lands_the_right_bytes(transport):
    slow = StreamLink(bytes_per_s=200_000, delay_s=0.02)
    with proxied(transport, control=slow, data=slow) as (pair, _):
        pair.p.wait(SessionUp)
        pair.d.wait(SessionUp)
        assert transfer(pair, "slow", 20.0)


@pytest.mark.parametrize("transport", SOCKET_TRANSPORTS)
def test_a_silent_control_link_ends_the_session_by_its_lease_on_both_sides(transport):
    clock = SteppedClock()
    with proxied(transport, clock=clock) as (pair, proxies):
        pair.p.wait(SessionUp)
        pair.d.wait(SessionUp)
        key = pair.offer("r", NUM_TOKENS, P_BLOCKS)
        pair.expect("r", NUM_TOKENS)
        pair.d.wait(Offered, key)
        pair.grant(key, RANGES)
        proxies[0].stall()
        step_until_seen(pair, SessionLost)
        failed_on_both(pair, key)
