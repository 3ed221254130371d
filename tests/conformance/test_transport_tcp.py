"""The data path over plain sockets and TLS: who is let in, what may reach a block, and when both ends have left it."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
from support.connector import LAYOUT, PATIENCE_S, Pair, SteppedClock, handover, wait_until
from support.raw_peer import plain_tcp, raw_prefill
from support.recorder import Recorder

from kvrelay.connector.base import CancelOutcome, Failed, FailReason, Landed, Offered, Released, SessionLost, SessionUp
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.connector.messages import CommitMessage, GrantId, GrantMessage, OfferMessage
from kvrelay.connector.transport import tcp
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.pieces import MAX_VIEWS, PIECE_BYTES
from kvrelay.connector.transport.tcp_reader import TcpReader
from kvrelay.connector.transport.tcp_writer import TcpWriter
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey

B = LAYOUT.block_size
BLOCK = LAYOUT.block_bytes
KEY = RequestKey("r", 0)
SECRET = "s3cret"
NONCE = b"s" * 32
LARGE = KVLayout(num_layers=3, num_kv_heads=1, head_dim=1000, block_size=16, dtype="float32")  # 384,000 bytes a block


def hear(connection, num_bytes):
    """So many bytes of a socket with a timeout, or fewer if it ends before."""
    said = bytearray()
    while len(said) < num_bytes and (more := connection.recv(num_bytes - len(said))):
        said += more
    return bytes(said)


def is_ended(connection):
    """Waits for the end."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


class RawData:
    """A P's data connection, by hand."""

    def __init__(self, address, greeting):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(greeting)

    def hear(self, num_bytes):
        return hear(self.socket, num_bytes)

    def is_ended(self):
        return is_ended(self.socket)

    def send(self, grant_nonce, offset, payload, size=None):
        size = len(payload) if size is None else size
        self.socket.sendall(tcp.encode_header(grant_nonce, offset, size) + payload)

    def close(self):
        self.socket.close()


@contextlib.contextmanager
def raw_data(peer, greeting=None):
    data = RawData(peer.endpoints["tcp"], tcp.greeting(SECRET, peer.nonce) if greeting is None else greeting)
    try:
        yield data
    finally:
        data.close()


@contextlib.contextmanager
def admitted(peer):
    with raw_data(peer) as data:
        tcp.check_answer(SECRET, peer.nonce, data.hear(tcp.ANSWER_BYTES))
        yield data


@pytest.fixture
def granted(caplog):
    """D, and a raw P with a session and a grant of two blocks (5 and 2)."""
    pair = Pair("tcp")
    pair.p_values["epoch"] = "raw"
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open("tcp")
        pair.expect("r", 2 * B, digest=b"d" * 16)
        peer.say(OfferMessage(2 * B, b"d" * 16), KEY)
        pair.d.wait(Offered, KEY)
        pair.grant(KEY, [(0, 2 * B, (5, 2))])
        yield pair, peer, peer.hear(GrantMessage).body.grant_nonce
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def land(pair, peer):
    peer.say(CommitMessage(handover()), KEY)
    pair.d.wait(Landed, KEY)


def num_dropped(pair):
    return pair.receiver.statistics().num_dropped


# --- what reaches a block ---


def test_frames_fill_the_blocks_in_the_order_of_the_grant(granted):
    pair, peer, grant = granted
    run = np.random.default_rng(1).integers(0, 256, 2 * BLOCK, dtype=np.uint8).tobytes()
    with admitted(peer) as data:
        for start, end in ((BLOCK - 7, 2 * BLOCK), (0, 100), (100, BLOCK - 7)):
            data.send(grant, start, run[start:end])
        land(pair, peer)
    assert pair.d.region[5].tobytes() + pair.d.region[2].tobytes() == run


@pytest.mark.parametrize("step", [1, 7, tcp.HEADER_BYTES - 1, tcp.HEADER_BYTES + 1, BLOCK + tcp.HEADER_BYTES])
def test_the_network_may_cut_frames_anywhere(granted, step):
    pair, peer, grant = granted
    run = np.random.default_rng(2).integers(0, 256, 2 * BLOCK, dtype=np.uint8).tobytes()
    said = b"".join(
        tcp.encode_header(grant, start, len(run[start : start + 100])) + run[start : start + 100]
        for start in range(0, 2 * BLOCK, 100)
    )
    with admitted(peer) as data:
        data.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(said), step):
            data.socket.sendall(said[at : at + step])
        land(pair, peer)
    assert pair.d.region[5].tobytes() + pair.d.region[2].tobytes() == run


def test_doubled_and_overlapping_frames_are_counted_once(granted):
    pair, peer, grant = granted
    with admitted(peer) as data:
        for start, end in ((0, 100), (0, 100), (50, BLOCK), (0, BLOCK), (BLOCK + 9, 2 * BLOCK)):
            data.send(grant, start, b"\x07" * (end - start))
        peer.say(CommitMessage(handover()), KEY)
        wait_until(lambda: (pair.d.region[2, 9:] == 7).all())
        wait_until(lambda: pair.receiver.statistics().states == {"COMMIT_SEEN": 1})
        assert not pair.d.of(Landed, KEY)
        data.send(grant, BLOCK, b"\x07" * 9)
        pair.d.wait(Landed, KEY)


def test_a_late_frame_does_not_touch_landed_blocks(granted):
    pair, peer, grant = granted
    with admitted(peer) as data:
        data.send(grant, 0, b"\x01" * 2 * BLOCK)
        land(pair, peer)
        before = num_dropped(pair)
        data.send(grant, 0, b"\x02" * 2 * BLOCK)
        wait_until(lambda: num_dropped(pair) == before + 1)
    assert (pair.d.region[[5, 2]] == 1).all()


def test_a_cancel_inside_a_frame_frees_its_blocks_and_cuts_no_neighbour(granted):
    """A06: what is left of the frame goes to scratch, and the next frame of the connection is found behind it."""
    pair, peer, grant = granted
    other = RequestKey("other", 0)
    pair.expect("other", B, digest=b"d" * 16)
    peer.say(OfferMessage(B, b"d" * 16), other)
    pair.d.wait(Offered, other)
    pair.grant(other, [(0, B, (9,))])
    neighbour = peer.hear(GrantMessage).body.grant_nonce
    with admitted(peer) as data:
        data.send(grant, 0, b"\x01" * 10, size=2 * BLOCK)
        wait_until(lambda: pair.d.region[5, 9] == 1)
        if pair.cancel_d(KEY) is CancelOutcome.PENDING:
            pair.d.wait(Released, KEY)
        pair.d.region[:] = 9
        data.socket.sendall(b"\x02" * (2 * BLOCK - 10))
        data.send(neighbour, 0, b"\x03" * BLOCK)
        peer.say(CommitMessage(handover()), other)
        pair.d.wait(Landed, other)
    assert (pair.d.region[9] == 3).all()
    assert (np.delete(pair.d.region, 9, axis=0) == 9).all()


@pytest.mark.parametrize(
    "forge",
    [
        lambda data, _grant: data.send(b"x" * 16, 0, b"1" * 8),
        lambda data, grant: data.send(grant, 2 * BLOCK - 7, b"1" * 8),
        lambda data, grant: data.send(grant, 2**64 - 1, b"1" * 8),
        lambda data, grant: data.send(grant, 0, b"1" * PIECE_BYTES),
    ],
    ids=["grant", "past the end", "far past", "larger than the grant"],
)
def test_a_frame_that_is_not_meant_or_does_not_fit_touches_nothing(granted, forge):
    pair, peer, grant = granted
    before = num_dropped(pair)
    with admitted(peer) as data:
        forge(data, grant)
        wait_until(lambda: num_dropped(pair) == before + 1)
        assert not pair.d.region.any()
        data.send(grant, 0, b"\x05" * 2 * BLOCK)
        land(pair, peer)


@pytest.mark.parametrize("size", [0, PIECE_BYTES + 1, 2**32 - 1])
def test_a_size_that_no_frame_has_ends_the_connection_and_its_session(granted, size):
    pair, peer, grant = granted
    before = num_dropped(pair)
    with admitted(peer) as data:
        data.send(grant, 0, b"", size=size)
        assert data.is_ended()
        assert pair.d.wait(Failed, KEY).reason == FailReason.DATA_FAILED
        pair.d.wait(Released, KEY)
        assert pair.d.wait(SessionLost).peer_epoch == "raw"
    assert num_dropped(pair) == before + 1
    assert not pair.d.region.any()


def test_the_right_grant_on_another_sessions_connection_touches_nothing(granted):
    pair, peer, grant = granted
    with raw_prefill(pair.receiver.address(), epoch="thief") as thief:
        thief.open("tcp")
        before = num_dropped(pair)
        with admitted(thief) as data:
            data.send(grant, 0, b"\x01" * 2 * BLOCK)
            wait_until(lambda: num_dropped(pair) == before + 1)
    assert not pair.d.region.any()
    with admitted(peer) as data:
        data.send(grant, 0, b"\x05" * 2 * BLOCK)
        land(pair, peer)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("num_bytes", [1, tcp.HEADER_BYTES, tcp.HEADER_BYTES + 10, tcp.HEADER_BYTES + BLOCK])
def test_a_data_connection_that_ends_anywhere_ends_its_transfers_at_once(granted, num_bytes, reset):
    pair, peer, grant = granted
    with admitted(peer) as data:
        data.socket.sendall((tcp.encode_header(grant, 0, BLOCK) + b"\x01" * BLOCK)[:num_bytes])
        if reset:
            data.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        data.close()
        failed = pair.d.wait(Failed, KEY)
    assert (failed.reason, failed.retryable) == (FailReason.DATA_FAILED, True)
    pair.d.wait(Released, KEY)
    pair.d.wait(SessionLost)


# --- who is let in ---


@pytest.mark.parametrize(
    "greet",
    [
        lambda _nonce: b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" + b" " * tcp.GREETING_BYTES,
        lambda nonce: tcp.greeting("guessed", nonce),
        lambda nonce: tcp.greeting(SECRET, bytes(len(nonce))),
        lambda nonce: tcp.greeting(SECRET, nonce)[:-1] + b"?",
    ],
    ids=["another protocol", "another secret", "no session's", "altered"],
)
def test_a_stranger_is_shown_out_and_the_session_stays(granted, greet):
    """E02."""
    pair, peer, grant = granted
    before = num_dropped(pair)
    with raw_data(peer, greet(peer.nonce)) as stranger:
        assert stranger.is_ended()
    assert num_dropped(pair) == before + 1
    with admitted(peer) as data:
        data.send(grant, 0, b"\x05" * 2 * BLOCK)
        land(pair, peer)


def test_a_greeting_is_good_once(granted):
    pair, peer, grant = granted
    with admitted(peer) as data:
        with raw_data(peer) as second:
            assert second.is_ended()
        data.send(grant, 0, b"\x05" * 2 * BLOCK)
        land(pair, peer)


def test_strangers_who_say_nothing_are_bounded_and_given_five_seconds():
    """E02."""
    clock, recorder = SteppedClock(), Recorder()
    reader = TcpReader(np.zeros((4, 1000), np.uint8), clock, SECRET, "127.0.0.1", 0, "")
    clock.connectors.append(reader._loop)
    reader.start(recorder)
    reader.begin_session(NONCE)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(plain_tcp(reader.endpoint.address)) for _ in range(300)]
        assert is_ended(silent[300 - 256 - 1]), "the oldest have to leave for the newest"
        wait_until(lambda: len(reader._half_open) == 256)
        meant = stack.enter_context(plain_tcp(reader.endpoint.address))
        meant.sendall(tcp.greeting(SECRET, NONCE))
        tcp.check_answer(SECRET, NONCE, hear(meant, tcp.ANSWER_BYTES))
        clock.advance(tcp.HANDSHAKE_S)
        assert is_ended(silent[-1])
        wait_until(lambda: len(reader._connections) == 1)
        assert not reader._half_open
        assert not recorder.heard
    reader.close()


def test_a_p_that_stops_inside_a_frame_holds_up_nobody(granted):
    pair, peer, grant = granted
    with admitted(peer) as data:
        data.send(grant, 0, b"\x01" * 10, size=2 * BLOCK)
        wait_until(lambda: pair.d.region[5, 9] == 1)
        with raw_prefill(pair.receiver.address(), epoch="another") as another:
            another.open("tcp")
            before = num_dropped(pair)
            with admitted(another) as other_data:
                other_data.send(b"x" * 16, 0, b"1" * 8)
                wait_until(lambda: num_dropped(pair) == before + 1)
        data.socket.sendall(b"\x01" * (2 * BLOCK - 10))
        land(pair, peer)


# --- the writer alone ---


class RawReader:
    """A D's data socket, by hand."""

    def __init__(self, answers=True):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.answers = answers
        self.connection = None

    def accept(self):
        self.socket.settimeout(PATIENCE_S)
        self.connection, _ = self.socket.accept()
        self.connection.settimeout(PATIENCE_S)
        said = self.hear(tcp.GREETING_BYTES)
        assert tcp.check_greeting(SECRET, said) == NONCE
        if self.answers:
            self.connection.sendall(tcp.answer(SECRET, NONCE))

    def hear(self, num_bytes):
        return hear(self.connection, num_bytes)

    def hear_frame(self):
        grant_nonce, offset, size = tcp.decode_header(self.hear(tcp.HEADER_BYTES))
        return grant_nonce, offset, self.hear(size)

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.socket.close()


@pytest.fixture
def by_hand():
    """A writer with 128 blocks of 1 MiB, and a D by hand that has answered."""
    d = RawReader()
    writer, recorder = TcpWriter(np.ones((128, PIECE_BYTES), np.uint8), MonotonicClock(), SECRET), Recorder()
    link = writer.connect(NONCE, d.address, recorder)
    d.accept()
    yield d, writer, link, recorder
    writer.close()
    d.close()


def grant_id(letter):
    return GrantId(NONCE, letter * 16, KEY)


def fill(link, grant):
    link.write(grant, [Copy(i, i, i, 0, PIECE_BYTES) for i in range(128)])


def until_stuck(recorder):
    """Until the kernel takes no more: nothing is written for a while, with the peer not reading."""
    seen, pause = -1, threading.Event()
    while seen != (now := recorder.num_written()) or not now:
        seen = now
        pause.wait(0.05)
    return seen


def test_a_stop_of_a_writer_that_is_stuck_in_a_frame_needs_no_word_from_the_peer(by_hand):
    """A07: and what follows on the connection is found behind the frame, whose rest is no block's bytes."""
    d, _writer, link, recorder = by_hand
    grant, after = grant_id(b"g"), grant_id(b"h")
    fill(link, grant)
    written = until_stuck(recorder)
    assert written < 128 * PIECE_BYTES
    if not link.stop(grant):
        wait_until(lambda: recorder.has("writer_idle", grant))
    link.write(after, [Copy(3, 0, 0, 0, 1000)])
    whole = 0
    while (frame := d.hear_frame())[0] == grant.grant_nonce:
        whole += frame[2] == b"\x01" * PIECE_BYTES
        assert frame[2].rstrip(b"\0").strip(b"\x01") == b""
    assert frame == (after.grant_nonce, 0, b"\x01" * 1000)
    assert whole * PIECE_BYTES == written
    wait_until(lambda: recorder.num_written() == written + 1000)


def test_a_stuck_writer_is_closed_without_a_word_from_the_peer(by_hand):
    _d, writer, link, recorder = by_hand
    fill(link, grant_id(b"g"))
    until_stuck(recorder)
    began = time.monotonic()
    writer.close()
    assert not link.is_running()
    assert time.monotonic() - began < tcp.STOP_S


def test_the_end_of_the_peer_frees_a_stuck_writer(by_hand):
    d, _writer, link, recorder = by_hand
    fill(link, grant_id(b"g"))
    until_stuck(recorder)
    d.connection.close()
    wait_until(lambda: recorder.has("write_failed"))
    assert link.stop(grant_id(b"g")) or recorder.has("writer_idle", grant_id(b"g"))


def test_an_idle_writer_hears_of_the_end_of_its_peer(by_hand):
    d, _writer, _link, recorder = by_hand
    d.connection.close()
    wait_until(lambda: recorder.has("write_failed", NONCE))


def test_a_d_that_talks_back_is_no_d(by_hand):
    d, _writer, _link, recorder = by_hand
    d.connection.sendall(b"?")
    wait_until(lambda: recorder.has("write_failed", NONCE))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request" + b" " * tcp.ANSWER_BYTES,
        tcp.answer("guessed", NONCE),
        tcp.answer(SECRET, bytes(32)),
    ],
    ids=["nothing", "another protocol", "another secret", "another session"],
)
def test_bytes_go_only_to_a_d_that_has_proved_the_session(said):
    d, recorder = RawReader(answers=False), Recorder()
    writer = TcpWriter(np.ones((4, 1000), np.uint8), MonotonicClock(), SECRET)
    link = writer.connect(NONCE, d.address, recorder)
    link.write(grant_id(b"g"), [Copy(0, 0, 0, 0, 1000)])
    d.accept()
    d.connection.sendall(said)
    with contextlib.suppress(OSError):  # P may have left already
        d.connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: recorder.has("write_failed", NONCE))
    assert is_ended(d.connection)
    assert not recorder.of("written")
    writer.close()
    d.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "[::1]:1", "127.0.0.1:port", "256.0.0.1:80"])
def test_an_address_where_nobody_is_fails_the_session(address):
    writer, recorder = TcpWriter(np.ones((4, 1000), np.uint8), MonotonicClock(), SECRET), Recorder()
    writer.connect(NONCE, address, recorder)
    wait_until(lambda: recorder.has("write_failed", NONCE))
    writer.close()


# --- both ends ---


@contextlib.contextmanager
def both(source, target, num_granted):
    recorder, files = Recorder(), set(os.listdir("/proc/self/fd"))
    reader = TcpReader(target, MonotonicClock(), SECRET, "127.0.0.1", 0, "")
    writer = TcpWriter(source, MonotonicClock(), SECRET)
    reader.start(recorder)
    reader.begin_session(NONCE)
    grant = grant_id(b"g")
    reader.accept(grant, tuple(range(num_granted))[::-1])
    yield reader, writer.connect(NONCE, reader.endpoint.address, recorder), grant, recorder
    writer.close()
    reader.close()
    assert set(os.listdir("/proc/self/fd")) == files


def test_more_blocks_than_one_call_takes_arrive_whole():
    num_blocks = 3 * MAX_VIEWS + 17
    source = np.random.default_rng(3).integers(0, 256, (num_blocks, 40), dtype=np.uint8)
    target = np.zeros_like(source)
    with both(source, target, num_blocks) as (_reader, link, grant, recorder):
        order = np.random.default_rng(4).permutation(num_blocks)
        link.write(grant, [Copy(int(order[i]), 0, i, 0, 40) for i in range(num_blocks)])
        wait_until(lambda: recorder.has("all_in", grant))
    assert np.array_equal(target[::-1], source[order])


def test_a_reader_inside_a_call_is_not_idle_until_it_has_returned():
    """A06: the handshake between the thread that gives blocks up and the kernel's writing into them."""
    target = np.zeros((4, 1000), np.uint8)
    with both(np.ones((4, 1000), np.uint8), target, 4) as (reader, link, grant, recorder):
        link.write(grant_id(b"x"), [Copy(0, 0, 0, 0, 1000)])  # the connection is up
        wait_until(lambda: reader.num_dropped == 1)
        [connection] = reader._connections.values()
        receive, entered, let_go = connection.stream.receive, threading.Event(), threading.Event()

        def slow(views):
            if len(views) > 1:  # into blocks
                entered.set()
                assert let_go.wait(20)
            return receive(views)

        connection.stream.receive = slow
        link.write(grant, [Copy(i, 0, i, 0, 1000) for i in range(4)])
        assert entered.wait(20)
        assert reader.stop(grant) is False
        assert not recorder.has("reader_idle", grant)
        let_go.set()
        wait_until(lambda: recorder.has("reader_idle", grant))
        target[:] = 3
        link.write(grant, [Copy(0, 0, 0, 0, 1000)])
        wait_until(lambda: reader.num_dropped == 2)
        assert (target == 3).all()
        assert not recorder.has("all_in", grant)


def test_a_writer_inside_a_call_is_not_idle_until_it_has_returned():
    """A07."""
    target = np.zeros((4, 1000), np.uint8)
    with both(np.ones((4, 1000), np.uint8), target, 4) as (reader, link, grant, recorder):
        link.write(grant_id(b"x"), [Copy(0, 0, 0, 0, 1000)])
        wait_until(lambda: reader.num_dropped == 1)
        send, entered, let_go = link._stream.send, threading.Event(), threading.Event()

        def slow(views):
            entered.set()
            assert let_go.wait(20)
            return send(views[:2])

        link._stream.send = slow
        link.write(grant, [Copy(i, 0, i, 0, 1000) for i in range(4)])
        assert entered.wait(20)
        assert link.stop(grant) is False
        assert not recorder.has("writer_idle", grant)
        let_go.set()
        wait_until(lambda: recorder.has("writer_idle", grant))
        assert recorder.num_written() == 1000


def test_a_stop_before_the_first_byte_of_a_frame_leaves_no_trace_of_it():
    target = np.full((4, 1000), 7, np.uint8)
    with both(np.ones((4, 1000), np.uint8), target, 4) as (reader, link, grant, recorder):
        wait_until(lambda: link._is_open)
        begin = link._begin

        def stopped_at_once():
            began = begin()
            if began and link._grant == grant:
                assert link.stop(grant) is False
            return began

        link._begin = stopped_at_once
        link.write(grant, [Copy(0, 0, 0, 0, 1000)])
        link.write(grant_id(b"x"), [Copy(0, 0, 0, 0, 1000)])
        wait_until(lambda: reader.num_dropped == 1)
        assert recorder.has("writer_idle", grant)
        assert (target == 7).all()


def test_blocks_that_are_no_divisor_of_a_piece_arrive_whole():
    pair = Pair("tcp", layout=LARGE)
    ranges = [(0, 7 * 16, (9, 0, 33, 12, 50, 4, 60))]
    key = pair.run("r", 7 * 16, ranges)
    pair.check_bytes(key, ranges)
    assert pair.sender.statistics().num_bytes == 7 * LARGE.block_bytes
    pair.close()


# --- trust ---


@pytest.mark.parametrize(
    ("address", "insecure", "reached"),
    [
        ("127.0.0.1:5", False, True),
        ("[::1]:5", False, True),
        ("localhost:5", False, True),
        ("10.0.0.7:5", False, False),
        ("10.0.0.7:5", True, True),
        ("127.0.0.1.example.org:5", False, False),
        ("tls://127.0.0.1:5", True, False),
        ("127.0.0.1", True, False),
    ],
)
def test_bytes_in_the_clear_stay_on_this_machine_unless_told_otherwise(address, insecure, reached):
    writer = TcpWriter(np.ones((4, 1000), np.uint8), MonotonicClock(), SECRET, insecure=insecure)
    assert writer.reaches(address) is reached


def values(transport="auto", **more):
    region = np.zeros((4, BLOCK), np.uint8)
    return {
        "region": region,
        "layout": LAYOUT,
        "fingerprint": "model",
        "epoch": "e",
        "secret": SECRET,
        "wake_up": int,
        "transport": transport,
    } | more


def test_beyond_loopback_tcp_is_offered_only_with_tls_or_insecure():
    for insecure in (False, True):
        receiver = make_receiver(**values(bind="0.0.0.0", advertise="192.0.2.1", insecure=insecure))
        assert ("tcp" in receiver._readers) is insecure
        receiver.close()
    with pytest.raises(ConfigError, match="tcp"):
        make_receiver(**values("tcp", bind="0.0.0.0", advertise="192.0.2.1"))


def test_auto_takes_tcp_before_zmq_on_one_machine():
    pair = Pair("tcp")
    pair.sender.close()
    pair.receiver.close()
    pair.named = {}
    pair.start_receiver()
    pair.start_sender()
    assert pair.sender.statistics().sessions == {pair.d_values["epoch"]: "tcp"}
    pair.close()


# --- TLS ---


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_identity(folder, name, ca, *, host="127.0.0.1"):
    (folder / "name.ext").write_text(f"subjectAltName=IP:{host}\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key"]
    openssl(folder, "req", *key, "-subj", f"/CN={name}", "-out", f"{name}.csr")
    signed = ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-extfile", "name.ext"]
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-days", "30", "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    """Files of TLS by the name of whose they are: two nodes of one authority, one of another, one for another host."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("tls")
    for ca in ("ca", "other-ca"):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{ca}.key"]
        openssl(folder, "req", "-x509", *key, "-subj", f"/CN={ca}", "-days", "30", "-out", f"{ca}.pem")
    make_identity(folder, "node", "ca")
    make_identity(folder, "stranger", "other-ca")
    make_identity(folder, "elsewhere", "ca", host="192.0.2.1")

    def files(name, ca="ca"):
        return tcp.DataTls(certificate=f"{folder}/{name}.pem", key=f"{folder}/{name}.key", ca=f"{folder}/{ca}.pem")

    return files


def test_a_transfer_over_tls_arrives_whole(identities):
    pair = Pair("tcp", layout=LARGE, p={"data_tls": identities("node")}, data_tls=identities("node"))
    assert pair.receiver._readers["tcp"].endpoint.address.startswith("tls://")
    ranges = [(0, 30 * 16, tuple(range(40, 10, -1)))]
    key = pair.run("r", 30 * 16, ranges)
    pair.check_bytes(key, ranges)
    pair.close()


def test_small_frames_over_tls_wait_for_no_others(identities):
    """Bytes that TLS has taken from the socket already are read without the socket's saying so."""
    pair = Pair("tcp", p={"data_tls": identities("node")}, data_tls=identities("node"))
    for i in range(20):
        key = pair.run(f"r{i}", 9 * B, [(0, 9 * B, tuple(range(i, i + 9)))])
        pair.check_bytes(key, [(0, 9 * B, tuple(range(i, i + 9)))])
    pair.close()


@pytest.mark.parametrize(
    ("p", "d"),
    [("stranger", "node"), ("node", "stranger"), ("node", "elsewhere")],
    ids=["D does not know P", "P does not know D", "D is another host"],
)
def test_both_ends_check_each_others_certificate(identities, p, d):
    pair = Pair("tcp", connect=False, p={"data_tls": identities(p)}, data_tls=identities(d))
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    lost = pair.p.wait(SessionLost)
    assert "data connection" in lost.reason
    key = pair.offer("r", B)
    pair.p.wait(Failed, key)
    assert not pair.d.region.any()
    pair.close()


def test_a_p_without_tls_does_not_reach_a_d_with_it(identities):
    pair = Pair("tcp", connect=False, data_tls=identities("node"))
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    assert pair.p.wait(SessionLost).reason.startswith("FAILED_PRECONDITION")
    pair.close()


def test_bytes_that_are_no_tls_disturb_nobody(identities):
    """E02."""
    pair = Pair("tcp", p={"data_tls": identities("node")}, data_tls=identities("node"))
    address = pair.receiver._readers["tcp"].endpoint.address.removeprefix("tls://")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, tcp.greeting(SECRET, NONCE)):
        with plain_tcp(address) as connection:
            connection.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    wait_until(lambda: num_dropped(pair) == 3)
    pair.run("alive", B, [(0, B, (1,))])
    assert len(pair.d.of(SessionUp)) == 1
    pair.close()


def test_tls_files_that_are_none_are_a_config_error_by_name(tmp_path):
    files = tcp.DataTls(certificate=f"{tmp_path}/none.pem", key=f"{tmp_path}/none.key", ca=f"{tmp_path}/ca.pem")
    for make in (make_receiver, make_sender):
        with pytest.raises(ConfigError, match=r"none\.pem"):
            make(**values(data_tls=files))
