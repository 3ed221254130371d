"""One-sided transports: D gives blocks back only on P's word, or when P can write no more."""

import pytest
from support.connector import LAYOUT, Pair, SteppedClock, wait_until

from kvrelay.connector.base import CancelOutcome, Failed, FailReason, Released, SessionLost, SessionUp
from kvrelay.connector.transport.inproc import InprocReader

B = LAYOUT.block_size


@pytest.fixture
def pair(caplog):
    pair = Pair("inproc")
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


@pytest.fixture
def stepped():
    pair = Pair("inproc", clock=SteppedClock())
    yield pair
    pair.close()


def quarantine(pair):
    """A granted transfer whose session D loses while P still believes in it."""
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    session = pair.receiver._peers[pair.p_values["epoch"]].session
    pair.receiver._acceptor.close_session(session, "the test cut it")
    assert pair.d.wait(Failed, key).reason == FailReason.PEER_LOST
    return key


def test_blocks_of_a_lost_session_are_quarantined_until_ps_word_in_the_next(pair):
    key = quarantine(pair)
    pair.p.wait(SessionLost)
    pair.p.wait(Released, key)
    pair.d.wait(SessionUp, count=2)
    pair.d.wait(Released, key)
    order = [type(e) for e in pair.d.seen if isinstance(e, (SessionLost, Released, SessionUp))]
    assert order == [SessionUp, SessionLost, Released, SessionUp]
    assert pair.receiver.statistics().num_quarantined_blocks == 0
    pair.p.wait(SessionUp, count=2)
    pair.run("next", 2 * B, [(0, 2 * B, (1, 2))])


def test_quarantined_blocks_are_counted_and_shown_and_come_back_with_ps_end(stepped):
    key = quarantine(stepped)  # no clock runs: P does not dial again
    stepped.p.wait(Released, key)
    assert stepped.receiver.statistics().num_quarantined_blocks == 2
    assert stepped.receiver.statistics().states == {"QUARANTINED": 1}
    stepped.d.collect()
    assert not stepped.d.of(Released, key)
    assert stepped.cancel_d(key) is CancelOutcome.PENDING
    stepped.sender.close()
    stepped.d.wait(Released, key)


def test_a_revoked_transfer_waits_for_ps_word(pair):
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    assert pair.cancel_d(key) is CancelOutcome.PENDING
    pair.d.wait(Released, key)
    assert pair.p.wait(Failed, key).reason == FailReason.REVOKED
    assert not pair.d.of(Failed, key)


def test_a_p_that_does_not_answer_a_revoke_is_shown_as_quarantine(stepped):
    key = stepped.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    wait_until(lambda: stepped.sender.statistics().states == {"SENDING": 1})
    with stepped.sender._lock:  # P's connector hears nothing
        assert stepped.cancel_d(key) is CancelOutcome.PENDING
        stepped.clock.advance(4.5)
        wait_until(lambda: stepped.receiver.statistics().states == {"REVOKED": 1})
        stepped.clock.advance(0.5)
        wait_until(lambda: stepped.receiver.statistics().states == {"QUARANTINED": 1})
        assert stepped.receiver.statistics().num_quarantined_blocks == 2
    stepped.d.wait(Released, key)


def test_a_block_outside_ds_pool_fails_the_write_and_touches_nothing(pair):
    link = pair.sender._peers[pair.d_values["epoch"]].link
    link.reader = InprocReader(pair.hub, "small", pair.d.region[:4])  # smaller than what D grants from
    key = pair.begin("r", B, [(0, B, (5,))])
    pair.push(key, 0, B)
    assert pair.p.wait(Failed, key).reason in ("WRITE_FAILED", FailReason.PEER_LOST)
    pair.p.wait(Released, key)
    pair.d.wait(Released, key)
    assert not pair.d.region.any()
