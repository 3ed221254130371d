"""The data path over ZMQ: what may reach a block, and when a writer and a reader have left it."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import zmq
from support.connector import LAYOUT, Pair, handover, wait_until
from support.gate import Gate
from support.raw_peer import raw_prefill
from support.recorder import Recorder

from kvrelay.connector import wire
from kvrelay.connector.base import EndReason, Failed, FailReason, Landed, Offered, Released, SessionLost
from kvrelay.connector.messages import CommitMessage, EndMessage, GrantId, GrantMessage, OfferMessage
from kvrelay.connector.transit import agree_transit
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.pieces import PIECE_BYTES
from kvrelay.connector.transport.zmq import ZmqReader, ZmqWriter
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey

B = LAYOUT.block_size
BLOCK = LAYOUT.block_bytes
KEY = RequestKey("r", 0)
LARGE = KVLayout(num_layers=3, num_kv_heads=1, head_dim=1000, block_size=16, dtype="float32")  # 384,000 bytes a block


@contextlib.contextmanager
def granting(**values):
    """D, and a raw P with a session and a grant of two blocks (5 and 2)."""
    pair = Pair("zmq", **values)
    pair.p_values["epoch"] = "raw"
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        pair.expect("r", 2 * B, digest=b"d" * 16)
        peer.say(OfferMessage(2 * B, b"d" * 16), KEY)
        pair.d.wait(Offered, KEY)
        pair.grant(KEY, [(0, 2 * B, (5, 2))])
        grant = peer.hear(GrantMessage).body
        yield pair, peer, GrantId(peer.nonce, grant.grant_nonce, KEY)
    pair.close()


@pytest.fixture
def granted(caplog):
    with granting() as parts:
        yield parts
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def send(data, grant, offset, payload, size=None):
    data.send_multipart([wire.encode_header(grant, offset, len(payload) if size is None else size), payload])


def land(pair, peer):
    peer.say(CommitMessage(handover()), KEY)
    pair.d.wait(Landed, KEY)


def test_pieces_fill_the_blocks_in_the_order_of_the_grant(granted):
    pair, peer, grant = granted
    run = np.random.default_rng(1).integers(0, 256, 2 * BLOCK, dtype=np.uint8).tobytes()
    data = peer.data()
    for start, end in ((BLOCK - 7, 2 * BLOCK), (0, 100), (100, BLOCK - 7)):
        send(data, grant, start, run[start:end])
    land(pair, peer)
    assert pair.d.region[5].tobytes() + pair.d.region[2].tobytes() == run


def test_where_part_of_each_block_comes_no_byte_goes_behind_it():
    """int8 in transit: what widening will write over, and what lies between two blocks' parts, is out of reach."""
    with granting(d={"transfer_dtype": "int8"}) as (pair, peer, grant):
        part = agree_transit(LAYOUT, LAYOUT, "int8").block_bytes
        data = peer.data()
        for offset, size in ((part, 1), (part - 1, 2), (0, BLOCK), (BLOCK + part - 1, 2), (2 * BLOCK, 1)):
            send(data, grant, offset, b"\x07" * size)
        wait_until(lambda: pair.receiver.statistics().num_dropped == 5)
        assert not pair.d.region.any()
        for offset in (0, BLOCK):
            send(data, grant, offset, bytes(part))
        land(pair, peer)
        assert pair.d.of(Landed, KEY)[0].num_bytes == 2 * part
        assert not pair.d.region.any()


def test_doubled_and_overlapping_pieces_are_counted_once(granted):
    pair, peer, grant = granted
    data = peer.data()
    for start, end in ((0, 100), (0, 100), (50, BLOCK), (0, BLOCK), (BLOCK + 9, 2 * BLOCK)):
        send(data, grant, start, b"\x07" * (end - start))
    peer.say(CommitMessage(handover()), KEY)
    wait_until(lambda: pair.receiver.statistics().states == {"COMMIT_SEEN": 1})
    wait_until(lambda: (pair.d.region[2, 9:] == 7).all())
    assert not pair.d.of(Landed, KEY)
    send(data, grant, BLOCK, b"\x07" * 9)
    pair.d.wait(Landed, KEY)


def test_a_late_piece_does_not_touch_landed_blocks(granted):
    pair, peer, grant = granted
    data = peer.data()
    send(data, grant, 0, b"\x01" * 2 * BLOCK)
    land(pair, peer)
    before = pair.receiver.statistics().num_dropped
    send(data, grant, 0, b"\x02" * 2 * BLOCK)
    wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
    assert (pair.d.region[[5, 2]] == 1).all()


def test_a_piece_after_a_cancel_does_not_touch_the_blocks(granted):
    """A06."""
    pair, peer, grant = granted
    data = peer.data()
    send(data, grant, 0, b"\x01" * 10)
    wait_until(lambda: pair.d.region[5, 0] == 1)
    pair.cancel_d(KEY)
    pair.d.region[:] = 9
    before = pair.receiver.statistics().num_dropped
    send(data, grant, 10, b"\x02" * 10)
    wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
    assert (pair.d.region == 9).all()


@pytest.mark.parametrize(
    "forge",
    [
        lambda send, g: send(replace(g, session_nonce=b"x" * 32), 0, b"1" * 8),
        lambda send, g: send(replace(g, grant_nonce=b"x" * 16), 0, b"1" * 8),
        lambda send, g: send(replace(g, key=RequestKey("other", 0)), 0, b"1" * 8),
        lambda send, g: send(replace(g, key=RequestKey("r", 1)), 0, b"1" * 8),
        lambda send, g: send(g, 2 * BLOCK - 7, b"1" * 8),
        lambda send, g: send(g, 2**63, b"1" * 8),
        lambda send, g: send(g, 0, b""),
        lambda send, g: send(g, 0, b"1" * 8, size=9),
        lambda send, g: send(g, 0, b"1" * 8, size=2**21),
    ],
    ids=["session", "grant", "request", "attempt", "past the end", "far past", "empty", "wrong size", "huge size"],
)
def test_a_piece_that_is_not_meant_or_does_not_fit_touches_nothing(granted, forge):
    pair, peer, grant = granted
    data = peer.data()

    before = pair.receiver.statistics().num_dropped
    forge(lambda g, offset, payload, size=None: send(data, g, offset, payload, size), grant)
    wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
    assert not pair.d.region.any()
    send(data, grant, 0, b"\x05" * 2 * BLOCK)
    land(pair, peer)


@pytest.mark.parametrize("frames", [[b"x"], [b"x", b"y", b"z"], [b"\xff" * 100, b"y"], [b"x" * 1000, b"y"]])
def test_frames_that_are_no_piece_are_dropped_and_counted(granted, frames):
    pair, peer, grant = granted
    data = peer.data()
    before = pair.receiver.statistics().num_dropped
    data.send_multipart(frames)
    wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
    send(data, grant, 0, b"\x05" * 2 * BLOCK)
    land(pair, peer)


def test_the_right_grant_on_another_sessions_connection_touches_nothing(granted):
    pair, peer, grant = granted
    with raw_prefill(pair.receiver.address(), epoch="thief") as thief:
        thief.open()
        data = thief.data()
        before = pair.receiver.statistics().num_dropped
        send(data, grant, 0, b"\x01" * 2 * BLOCK)
        wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
    assert not pair.d.region.any()
    send(peer.data(), grant, 0, b"\x05" * 2 * BLOCK)
    land(pair, peer)


def test_a_failed_data_connection_ends_its_transfers_at_once(granted):
    pair, peer, grant = granted
    data = peer.data()
    send(data, grant, 0, b"\x01" * 10)
    wait_until(lambda: pair.d.region[5, 0] == 1)
    data.close(0)
    failed = pair.d.wait(Failed, KEY)
    assert (failed.reason, failed.retryable) == (FailReason.DATA_FAILED, True)
    pair.d.wait(Released, KEY)
    pair.d.wait(SessionLost)


def test_commit_before_the_bytes_waits_for_them_and_end_frees(granted):
    pair, peer, grant = granted
    data = peer.data()
    send(data, grant, 0, b"\x01" * BLOCK)
    peer.say(EndMessage(EndReason.CANCELLED), KEY)
    assert pair.d.wait(Failed, KEY).reason == EndReason.CANCELLED
    pair.d.wait(Released, KEY)


# --- the writer alone ---


@pytest.fixture
def stuck():
    """A writer whose peer takes the connection and reads nothing."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVHWM, 1)
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    region = np.zeros((64, PIECE_BYTES), np.uint8)
    writer, recorder = ZmqWriter(region, MonotonicClock()), Recorder()
    link = writer.connect(b"s" * 32, f"127.0.0.1:{port}", recorder)
    grant = GrantId(b"s" * 32, b"g" * 16, KEY)
    link.write(grant, [Copy(i, i, i, 0, PIECE_BYTES) for i in range(64)])
    yield writer, link, recorder, grant, router
    writer.close()
    router.close(0)
    context.term()


def test_a_writer_whose_peer_does_not_read_holds_a_bounded_number_of_bytes_and_stops_at_once(stuck):
    _writer, link, recorder, grant, _router = stuck
    wait_until(lambda: recorder.num_written() >= 4 * PIECE_BYTES)
    wait_until(lambda: link._queue._in_hand._grant is None)
    assert recorder.num_written() < 64 * PIECE_BYTES
    if not link.stop(grant):
        wait_until(lambda: recorder.has("writer_idle", grant))
    written = recorder.num_written()
    link.write(GrantId(b"s" * 32, b"h" * 16, KEY), [])
    assert recorder.num_written() == written


def test_the_end_of_the_peer_frees_a_stuck_writer(stuck):
    _writer, _link, recorder, _grant, router = stuck
    wait_until(lambda: recorder.num_written() >= 4 * PIECE_BYTES)
    router.close(0)
    wait_until(lambda: recorder.has("write_failed"))


@contextlib.contextmanager
def writing(target, *, gate_of):
    """Four blocks on their way from one region to another, without a connector, and one end held inside a piece."""
    recorder, nonce = Recorder(), b"s" * 32
    reader = ZmqReader(target, MonotonicClock(), "127.0.0.1", 0, "")
    writer = ZmqWriter(np.ones_like(target), MonotonicClock())
    reader.start(recorder)
    reader.begin_session(nonce)
    grant = GrantId(nonce, b"g" * 16, KEY)
    reader.accept(grant, (0, 1, 2, 3))
    link = writer.connect(nonce, reader.endpoint.address, recorder)
    if gate_of == "reader":
        gate = reader._scatter = Gate(reader._scatter)
    else:
        gate = link._pack = Gate(link._pack)
    link.write(grant, [Copy(i, i, i, 0, LARGE.block_bytes) for i in range(4)])
    assert gate.entered.wait(20)
    yield reader, link, grant, recorder, gate
    writer.close()
    reader.close()


def test_a_reader_inside_a_piece_is_not_idle_until_it_has_left():
    """A06: the handshake between the thread that gives blocks up and the thread that writes into them."""
    target = np.zeros((4, LARGE.block_bytes), np.uint8)
    with writing(target, gate_of="reader") as (reader, _link, grant, recorder, gate):
        assert reader.stop(grant) is False
        assert not recorder.has("reader_idle", grant)
        gate.let_go.set()
        wait_until(lambda: recorder.has("reader_idle", grant))
        target[:] = 3
        wait_until(lambda: reader.num_dropped)
        assert (target == 3).all()
        assert not recorder.has("all_in", grant)


def test_a_writer_inside_a_piece_is_not_idle_until_it_has_left():
    """A07."""
    target = np.zeros((4, LARGE.block_bytes), np.uint8)
    with writing(target, gate_of="writer") as (_reader, link, grant, recorder, gate):
        assert link.stop(grant) is False
        assert not recorder.has("writer_idle", grant)
        gate.let_go.set()
        wait_until(lambda: recorder.has("writer_idle", grant))
        assert not recorder.has("written")
    assert not target.any()


def test_blocks_that_are_no_divisor_of_a_piece_arrive_whole():
    pair = Pair("zmq", layout=LARGE)
    ranges = [(0, 7 * 16, (9, 0, 33, 12, 50, 4, 60))]
    key = pair.run("r", 7 * 16, ranges)
    pair.check_bytes(key, ranges)
    assert pair.sender.statistics().num_bytes == 7 * LARGE.block_bytes
    pair.close()
