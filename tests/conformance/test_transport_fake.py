"""The connector over a transport whose pieces move when the test says so: the moments that are hard to hit."""

import threading

import pytest
from support.connector import LAYOUT, Pair, SteppedClock, wait_until

from kvrelay.connector.base import (
    CancelOutcome,
    EndReason,
    Failed,
    FailReason,
    Landed,
    Offered,
    Released,
    SessionLost,
    SessionUp,
)

B = LAYOUT.block_size


@pytest.fixture
def pair(caplog):
    pair = Pair("fake")
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def sent(pair, name="r"):
    """A transfer whose two pieces are on their way, with its commit."""
    pair.network.hold()
    key = pair.begin(name, 2 * B, [(0, 2 * B, (1, 2))])
    pair.push(key, 0, 2 * B)
    pair.commit(key)
    wait_until(lambda: pair.receiver.statistics().states == {"COMMIT_SEEN": 1})
    return key


def test_a_commit_before_the_bytes_waits_for_the_last_of_them(pair):
    key = sent(pair)
    pair.network.deliver(1)
    pair.d.collect()
    assert not pair.d.of(Landed, key)
    pair.network.deliver(1)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)


def test_late_pieces_of_a_cancelled_transfer_do_not_reach_its_blocks(pair):
    """A06."""
    key = sent(pair)
    assert pair.cancel_d(key) is CancelOutcome.FREED
    pair.d.region[:] = 5
    pair.network.deliver()
    assert (pair.d.region == 5).all()
    assert pair.p.wait(Failed, key).reason == FailReason.REVOKED


@pytest.mark.parametrize("end", ["cancel on D", "cancel on P", "loss of P"])
def test_blocks_come_back_only_when_the_reader_has_left_its_piece(pair, end):
    """A06."""
    pair.network.hold()
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    pair.push(key, 0, 2 * B)
    wait_until(lambda: pair.network.in_flight)
    pair.network.stays_in_piece = True
    pair.network.deliver(1)
    if end == "cancel on D":
        assert pair.cancel_d(key) is CancelOutcome.PENDING
    elif end == "cancel on P":
        pair.cancel_p(key)
    else:
        pair.sender.disconnect(pair.d_values["epoch"])
    wait_until(lambda: pair.receiver.statistics().states == {"STOPPING": 1})
    pair.d.collect()
    assert not pair.d.of(Released, key)
    assert pair.cancel_d(key) is CancelOutcome.PENDING
    pair.network.leave_piece()
    pair.d.wait(Released, key)


@pytest.mark.parametrize("end", ["cancel on D", "cancel on P", "loss of D"])
def test_ps_blocks_come_back_only_when_the_writer_has_left_its_piece(pair, end):
    """A07."""
    pair.network.writers_stay = True
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    pair.push(key, 0, 2 * B)
    [link] = pair.network.links
    wait_until(lambda: link.inside is not None)
    if end == "cancel on D":
        pair.cancel_d(key)
    elif end == "cancel on P":
        assert pair.cancel_p(key) is CancelOutcome.PENDING
    else:
        pair.receiver.close()
    wait_until(lambda: pair.sender.statistics().states == {"DRAINING": 1})
    pair.p.collect()
    assert not pair.p.of(Released, key)
    assert pair.cancel_p(key) is CancelOutcome.PENDING
    link.leave()
    pair.p.wait(Released, key)


def test_p_dials_again_only_when_its_writers_on_the_lost_session_are_idle():
    """HELLO's word on old sessions must be true when it is said."""
    pair = Pair("fake", clock=SteppedClock())
    pair.network.writers_stay = True
    key = pair.begin("r", B, [(0, B, (1,))])
    pair.push(key, 0, B)
    [link] = pair.network.links
    wait_until(lambda: link.inside is not None)
    session = pair.receiver._peers[pair.p_values["epoch"]].session
    pair.receiver._acceptor.close_session(session, "the test cut it")
    pair.p.wait(Failed, key)
    for _ in range(3):
        pair.clock.advance(2.0)
        served = threading.Event()
        pair.sender._loop.post(served.set)
        assert served.wait(20)
        assert pair.sender._peers[pair.d_values["epoch"]].dialer._connection is None
    link.leave()
    pair.p.wait(Released, key)
    wait_until(lambda: pair.clock.advance(0.1) or pair.p.collect() or len(pair.p.of(SessionUp)) == 2)
    pair.close()


def test_a_failed_data_connection_ends_all_transfers_on_it_on_both_sides(pair):
    keys = [pair.begin(f"r{i}", B, [(0, B, (i,))]) for i in range(3)]
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 3})
    pair.network.fail()
    for key in keys:
        assert pair.p.wait(Failed, key).reason in (EndReason.WRITE_FAILED, FailReason.REVOKED, FailReason.PEER_LOST)
        assert pair.d.wait(Failed, key).reason in (FailReason.DATA_FAILED, EndReason.WRITE_FAILED, FailReason.PEER_LOST)
        pair.p.wait(Released, key)
        pair.d.wait(Released, key)
    for side in (pair.p, pair.d):
        side.wait(SessionLost)
        side.wait(SessionUp, count=2)
    pair.run("after", B, [(0, B, (1,))])


def test_p_that_loses_d_after_its_commit_says_that_it_does_not_know(pair):
    key = sent(pair)
    pair.receiver.close()
    failed = pair.p.wait(Failed, key)
    assert failed.reason in (FailReason.UNKNOWN, FailReason.REVOKED)
    pair.p.wait(Released, key)


def test_p_keeps_its_blocks_until_d_has_landed_them(pair):
    """A07: the commit alone frees nothing on P."""
    key = sent(pair)
    pair.p.collect()
    assert not pair.p.of(Released, key)
    pair.network.deliver()
    pair.p.wait(Released, key)


def test_offers_wait_in_turn_while_d_has_no_room(pair):
    keys = [pair.offer(f"r{i}", B) for i in range(3)]
    for i in range(3):
        pair.expect(f"r{i}", B)
    for key in keys:
        pair.d.wait(Offered, key)
        pair.grant(key, [(0, B, (1,))])
        pair.push(key, 0, B)
        pair.commit(key)
        pair.d.wait(Landed, key)
    assert [e.key for e in pair.d.of(Offered)] == keys
