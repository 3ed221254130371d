"""What every transport must do under the hand-off, and the fake too."""

import numpy as np
import pytest
from support.connector import LAYOUT, TRANSPORTS, Pair, SteppedClock, wait_until

from kvrelay.connector.base import (
    CancelOutcome,
    Delivered,
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

B = LAYOUT.block_size


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def pair(transport, caplog):
    pair = Pair(transport)
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


@pytest.fixture
def stepped(transport, caplog):
    pair = Pair(transport, clock=SteppedClock())
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


# --- bytes ---


def test_scattered_blocks_arrive_where_the_grant_says(pair):
    """A01, A03: blocks are paired by position, whatever the ids on either side."""
    ranges = [(0, 8, (40, 3)), (12, 18, (7, 21))]
    key = pair.run("r", 18, ranges, p_blocks=(9, 30, 2, 55, 11))
    pair.check_bytes(key, ranges)
    landed = pair.d.of(Landed, key)[0]
    assert landed.num_bytes == 4 * LAYOUT.block_bytes
    assert landed.transport == pair.transport
    assert landed.handover.num_cached_tokens == 3
    assert pair.p.of(Delivered, key)


def test_only_the_missing_blocks_travel(pair):
    pair.run("r", 5 * B, [(3 * B, 5 * B, (1, 2))])
    assert pair.sender.statistics().num_bytes == 2 * LAYOUT.block_bytes
    assert pair.receiver.statistics().num_bytes == 2 * LAYOUT.block_bytes
    touched = {block for block in range(len(pair.d.region)) if pair.d.region[block].any()}
    assert touched <= {1, 2}


def test_a_transfer_of_no_blocks_ends_in_a_commit_and_gives_everything_back(pair):
    """A02, B02: D has the whole prompt already, again and again."""
    for i in range(50):
        key = pair.run(f"r{i}", 4 * B, [])
        assert pair.d.of(Landed, key)[0].num_bytes == 0
    assert pair.sender.statistics().num_bytes == 0


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1])
@pytest.mark.parametrize("num_cached_blocks", [0, 1, 2])
def test_every_edge_of_a_block_is_paired_by_position(pair, num_tokens, num_cached_blocks):
    """A01, A03."""
    start = min(num_cached_blocks * B, num_tokens // B * B)
    num_missing = -(-(num_tokens - start) // B)
    ranges = [(start, num_tokens, tuple(range(20, 20 + num_missing)))] if num_missing else []
    key = pair.run("r", num_tokens, ranges, p_blocks=range(5, 5 + -(-num_tokens // B)))
    pair.check_bytes(key, ranges)


def test_pushes_before_the_grant_are_sent_when_it_comes(pair):
    key = pair.offer("r", 3 * B)
    pair.push(key, 0, 2 * B)
    pair.push(key, 2 * B, 3 * B)
    pair.commit(key)
    pair.expect("r", 3 * B)
    pair.d.wait(Offered, key)
    assert pair.sender.statistics().num_bytes == 0
    ranges = [(0, 3 * B, (4, 5, 6))]
    pair.grant(key, ranges)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)
    pair.check_bytes(key, ranges)


def test_layers_may_be_pushed_apart_and_each_byte_travels_once(pair):
    ranges = [(0, 2 * B + 1, (8, 9, 10))]
    key = pair.begin("r", 2 * B + 1, ranges)
    pair.push(key, 0, 2 * B, layers=range(1, 2))
    pair.push(key, 0, 2 * B, layers=range(2))
    pair.push(key, 2 * B, 2 * B + 1, layers=range(2, 3))
    pair.push(key, 0, 2 * B + 1)
    pair.commit(key)
    pair.d.wait(Landed, key)
    pair.check_bytes(key, ranges)
    assert pair.sender.statistics().num_bytes == 3 * LAYOUT.block_bytes


def test_nothing_lands_before_the_last_byte_is_pushed(pair):
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    pair.push(key, 0, B)
    pair.commit(key)
    wait_until(lambda: pair.sender.statistics().num_bytes == LAYOUT.block_bytes)
    assert pair.sender.statistics().states == {"SENDING": 1}
    pair.push(key, B, 2 * B)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)


def test_many_transfers_at_once_do_not_mix(pair):
    transfers = {}
    for i in range(20):
        num_tokens = 2 * B + i % 3
        blocks = tuple(3 * i + j for j in range(-(-num_tokens // B)))
        transfers[pair.offer(f"r{i}", num_tokens, p_blocks=blocks)] = (num_tokens, blocks)
    for key, (num_tokens, _blocks) in transfers.items():
        pair.expect(key.request_id, num_tokens)
    for key, (num_tokens, blocks) in transfers.items():
        pair.d.wait(Offered, key)
        pair.grant(key, [(0, num_tokens, [63 - block for block in blocks])])
    for key, (num_tokens, _blocks) in transfers.items():
        pair.push(key, 0, num_tokens)
        pair.commit(key)
    for key, (num_tokens, blocks) in transfers.items():
        pair.d.wait(Landed, key)
        pair.p.wait(Released, key)
        pair.check_bytes(key, [(0, num_tokens, [63 - block for block in blocks])])


# --- either side's call or offer first ---


def test_a_call_before_the_offer_waits_for_it(pair):
    key = pair.expect("r", B)
    pair.offer("r", B)
    pair.d.wait(Offered, key)
    pair.grant(key, [(0, B, (1,))])
    pair.push(key, 0, B)
    pair.commit(key)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)


def test_an_offer_that_nobody_calls_for_is_refused_after_five_seconds(stepped):
    key = stepped.offer("r", B)
    wait_until(lambda: stepped.receiver.statistics().states == {"EARLY": 1})
    stepped.clock.advance(4.0)
    assert stepped.receiver.statistics().states == {"EARLY": 1}
    stepped.clock.advance(1.0)
    failed = stepped.p.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (RefuseReason.UNKNOWN, True)
    stepped.p.wait(Released, key)
    stepped.expect("r", B)
    assert stepped.d.wait(Failed, key).reason == RefuseReason.UNKNOWN


def test_a_call_for_a_peer_without_a_session_fails_at_once(pair):
    pair.p_values = pair.p_values | {"epoch": "nobody"}
    key = pair.expect("r", B)
    assert pair.d.wait(Failed, key).reason == FailReason.PEER_LOST


def test_an_offer_to_a_peer_without_a_session_fails_at_once(pair):
    epoch = pair.d_values["epoch"]
    pair.d_values = pair.d_values | {"epoch": "nobody"}
    key = pair.offer("r", B)
    assert pair.p.wait(Failed, key).reason == FailReason.PEER_LOST
    pair.p.wait(Released, key)
    pair.d_values = pair.d_values | {"epoch": epoch}


def test_two_prompts_under_one_key_are_refused_and_not_mixed(pair):
    """A09: the router's call and P's offer must mean the same tokens."""
    key = pair.offer("r", B)
    pair.expect("r", B, digest=b"another prompt!!")
    assert pair.d.wait(Failed, key).reason == RefuseReason.LAYOUT
    assert pair.p.wait(Failed, key).reason == RefuseReason.LAYOUT
    pair.p.wait(Released, key)


def test_a_used_key_is_refused_in_the_same_session(pair):
    """A09: what came late, or twice, does not start again."""
    key = pair.run("r", B, [(0, B, (1,))])
    pair.offer("r", B)
    assert pair.p.wait(Failed, key).reason == RefuseReason.UNKNOWN
    pair.p.wait(Released, key, count=2)
    del pair.offered[key]
    pair.run("r2", B, [(0, B, (1,))])


def test_a_used_key_that_is_called_for_again_fails_for_no_fault_of_the_first_transfer(pair):
    key = pair.run("r", B, [(0, B, (1,))])
    pair.expect("r", B)
    failed = pair.d.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (FailReason.UNKNOWN, False)


def test_a_new_attempt_runs_beside_the_old_one(pair):
    first = pair.begin("r", B, [(0, B, (1,))])
    second = pair.offer("r", B, attempt=1)
    pair.expect("r", B, attempt=1)
    pair.d.wait(Offered, second)
    pair.grant(second, [(0, B, (2,))])
    for key in (first, second):
        pair.push(key, 0, B)
        pair.commit(key)
        pair.d.wait(Landed, key)
        pair.p.wait(Released, key)


# --- ends ---


@pytest.mark.parametrize("reason", [RefuseReason.NO_ROOM, RefuseReason.TOO_LARGE])
def test_a_refusal_gives_p_its_blocks_back(pair, reason):
    key = pair.offer("r", B)
    pair.expect("r", B)
    pair.d.wait(Offered, key)
    pair.receiver.refuse(key, reason)
    failed = pair.p.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (reason, reason.retryable)
    pair.p.wait(Released, key)


def test_an_end_with_the_first_token_frees_d_without_a_commit(pair):
    key = pair.begin("r", B, [(0, B, (1,))])
    pair.push(key, 0, B)
    pair.cancel_p(key, EndReason.FINISHED)
    failed = pair.d.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (EndReason.FINISHED, False)
    pair.d.wait(Released, key)
    assert not pair.p.of(Failed, key)


def test_an_end_before_the_call_is_told_to_the_call(pair):
    key = pair.offer("r", B)
    wait_until(lambda: pair.receiver.statistics().states == {"EARLY": 1})
    assert pair.cancel_p(key, EndReason.FINISHED) is CancelOutcome.FREED
    wait_until(lambda: not pair.receiver.statistics().states)
    pair.expect("r", B)
    assert pair.d.wait(Failed, key).reason == EndReason.FINISHED


def test_a_cancel_on_d_before_the_grant_frees_at_once_and_says_nothing_more(pair):
    key = pair.offer("r", B)
    pair.expect("r", B)
    wait_until(lambda: pair.receiver.statistics().states == {"PENDING": 1})
    assert pair.cancel_d(key) is CancelOutcome.FREED
    assert pair.p.wait(Failed, key).reason == RefuseReason.CANCELLED
    pair.p.wait(Released, key)
    pair.d.collect()
    assert not pair.d.of(Offered, key)


def test_a_grant_for_a_transfer_that_has_ended_gives_the_blocks_back(pair):
    key = pair.offer("r", B)
    pair.expect("r", B)
    pair.d.wait(Offered, key)
    pair.cancel_p(key)
    pair.d.wait(Failed, key)
    pair.grant(key, [(0, B, (1,))])
    pair.d.wait(Released, key)


@pytest.mark.parametrize("num_pushed", [0, 1, 2])
def test_a_cancel_on_p_in_mid_transfer_ends_both_sides(pair, num_pushed):
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    if num_pushed:
        pair.push(key, 0, num_pushed * B)
    if pair.cancel_p(key) is CancelOutcome.PENDING:
        pair.p.wait(Released, key)
    assert pair.d.wait(Failed, key).reason == EndReason.CANCELLED
    pair.d.wait(Released, key)
    pair.run("next", 2 * B, [(0, 2 * B, (1, 2))])


@pytest.mark.parametrize("num_pushed", [0, 1, 2])
def test_a_cancel_on_d_in_mid_transfer_ends_both_sides(pair, num_pushed):
    """A06: what D gives back is out of the writer's reach."""
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    if num_pushed:
        pair.push(key, 0, num_pushed * B)
    if pair.cancel_d(key) is CancelOutcome.PENDING:
        pair.d.wait(Released, key)
    pair.d.region[1:3] = 77
    pair.push(key, 0, 2 * B)
    assert pair.p.wait(Failed, key).reason == FailReason.REVOKED
    pair.p.wait(Released, key)
    assert (pair.d.region[1:3] == 77).all()
    assert not pair.d.of(Landed, key)


def test_a_cancel_of_what_has_ended_is_unknown(pair):
    key = pair.run("r", B, [(0, B, (1,))])
    assert pair.cancel_p(key) is CancelOutcome.UNKNOWN
    assert pair.cancel_d(key) is CancelOutcome.UNKNOWN


def test_the_deadline_ends_a_transfer_on_both_sides(stepped):
    deadline = stepped.clock.now() + 3.0
    key = stepped.offer("r", B, deadline=deadline)
    stepped.expect("r", B, deadline=deadline)
    stepped.d.wait(Offered, key)
    stepped.grant(key, [(0, B, (1,))])
    wait_until(lambda: stepped.sender.statistics().states == {"SENDING": 1})
    stepped.clock.advance(3.0)
    for side in (stepped.p, stepped.d):
        failed = side.wait(Failed, key)
        assert failed.reason in (FailReason.TIMEOUT, FailReason.REVOKED, EndReason.DEADLINE)
        side.wait(Released, key)


@pytest.mark.parametrize("state", ["WAITING", "PENDING"])
def test_the_deadline_ends_what_waits_on_d(stepped, state):
    deadline = stepped.clock.now() + 3.0
    if state == "PENDING":
        stepped.offer("r", B)
    key = stepped.expect("r", B, deadline=deadline)
    wait_until(lambda: stepped.receiver.statistics().states == {state: 1})
    stepped.clock.advance(3.0)
    assert stepped.d.wait(Failed, key).reason == FailReason.TIMEOUT
    if state == "PENDING":
        assert stepped.p.wait(Failed, key).reason == RefuseReason.DEADLINE


# --- digests ---


def test_equal_digests_let_a_transfer_land(pair):
    ranges = [(B, 3 * B - 1, (5, 4))]
    key = pair.begin("r", 3 * B - 1, ranges)
    pair.push(key, 0, 3 * B - 1)
    pair.commit(key, pair.digests(key))
    pair.d.wait(Landed, key)
    pair.check_bytes(key, ranges)


@pytest.mark.parametrize("spoil", ["changed", "too few"])
def test_a_digest_that_differs_keeps_the_request_from_starting(pair, spoil):
    key = pair.begin("r", 2 * B, [(0, 2 * B, (1, 2))])
    pair.push(key, 0, 2 * B)
    digests = pair.digests(key)
    pair.commit(key, (digests[0], b"?" * 16) if spoil == "changed" else digests[:1])
    failed = pair.d.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (FailReason.DATA_FAILED, True)
    pair.d.wait(Released, key)
    assert pair.p.wait(Failed, key).reason == FailReason.REVOKED
    pair.p.wait(Released, key)
    assert not pair.d.of(Landed, key)


# --- nodes and sessions ---


def test_the_loss_of_p_ends_its_transfers_on_d(pair):
    granted = pair.begin("granted", B, [(0, B, (1,))])
    waiting = pair.expect("waiting", B)
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    pair.sender.disconnect(pair.d_values["epoch"])
    assert pair.p.wait(Failed, granted).reason == FailReason.PEER_LOST
    pair.p.wait(Released, granted)
    pair.d.wait(SessionLost)
    for key in (granted, waiting):
        pair.d.wait(Failed, key)
    pair.d.wait(Released, granted)


def test_the_loss_of_d_ends_its_transfers_on_p(pair):
    offered = pair.offer("offered", B)
    sending = pair.begin("sending", B, [(0, B, (1,))])
    wait_until(lambda: "SENDING" in pair.sender.statistics().states)
    pair.receiver.close()
    pair.p.wait(SessionLost)
    for key in (offered, sending):
        assert pair.p.wait(Failed, key).retryable  # PEER_LOST, REVOKED, SHUTDOWN or WRITE_FAILED: which is seen first
        pair.p.wait(Released, key)


def test_a_lost_d_is_dialled_again_and_used(pair):
    """B06: a node that restarts on the same address is another node, with another epoch."""
    host, _, port = pair.receiver.address().rpartition(":")
    assert host == "127.0.0.1"
    pair.receiver.close()
    pair.p.wait(SessionLost)
    old_epoch = pair.d_values["epoch"]
    pair.d_values = pair.d_values | {"epoch": "restarted"}
    pair.start_receiver(control_port=int(port))
    pair.p.wait(SessionLost, count=2)  # another epoch than the one that was meant
    assert "epoch differs" in pair.p.of(SessionLost)[-1].reason
    pair.sender.disconnect(old_epoch)
    pair.connect()
    ranges = [(0, 2 * B, (3, 4))]
    pair.check_bytes(pair.run("r", 2 * B, ranges), ranges)


def test_a_restarted_p_has_a_session_of_its_own(pair):
    """B06."""
    key = pair.begin("r", B, [(0, B, (1,))])
    pair.sender.close()
    pair.d.wait(Failed, key)
    pair.d.wait(Released, key)
    pair.p.collect()
    pair.p_values = pair.p_values | {"epoch": "another life"}
    pair.start_sender()
    again = pair.run("s", B, [(0, B, (1,))], p_blocks=(2,))
    assert np.array_equal(pair.d.region[1], pair.p.region[2])
    assert again in pair.offered


def test_close_is_bounded_and_gives_everything_back_in_every_state(pair):
    pair.offer("offered", B)
    pair.expect("called", B)
    key = pair.offer("pending", B)
    pair.expect("pending", B)
    pair.d.wait(Offered, key)
    pair.begin("granted", B, [(0, B, (1,))])
    done = pair.begin("committed", B, [(0, B, (2,))])
    pair.push(done, 0, B)
    pair.commit(done)
    pair.d.wait(Landed, done)


def test_peers_that_are_known_already_are_not_dialled_twice(pair):
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    pair.run("r", B, [(0, B, (1,))])
    assert len(pair.d.of(SessionUp)) == 1
