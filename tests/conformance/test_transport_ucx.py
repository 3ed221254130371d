"""The data path over UCX: what may reach a block, whose connections count, and how each end of one is seen."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import ucx_process
from support.connector import LAYOUT, Pair, needs_ucx, wait_until
from support.gate import Gate
from support.recorder import Recorder
from support.ucx_process import GRANT, NONCE, NUM_BLOCKS, copies

from kvrelay.connector import wire
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.connector.transport import ucp, ucp_library
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.pieces import PIECE_BYTES
from kvrelay.connector.transport.ucx import GREETING, MAX_PIECES, format_address, parse_address
from kvrelay.connector.transport.ucx_reader import UcxReader
from kvrelay.connector.transport.ucx_writer import UcxWriter
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.errors import ConfigError, Unavailable
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey

pytestmark = needs_ucx
BLOCK = 100_000
AT_ONCE_S = 2.0  # seen: 1 to 20 ms
COMMON = {"layout": LAYOUT, "fingerprint": "model", "secret": "s3cret", "epoch": "e", "wake_up": lambda: None}
LARGE = KVLayout(num_layers=3, num_kv_heads=1, head_dim=1000, block_size=16, dtype="float32")  # 384,000 bytes a block


@pytest.fixture(params=["all", "tcp,self"])
def tls(request, monkeypatch):
    """What UCX may move bytes with: shared memory among it, or TCP alone."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


class Reading:
    """A reader alone, with one open session and a grant over its pool."""

    def __init__(self, region, block_ids, port=0):
        self.region = region
        self.events = Recorder()
        self.reader = UcxReader(region, MonotonicClock(), "127.0.0.1", port, "")
        self.reader.start(self.events)
        self.reader.begin_session(NONCE)
        self.reader.accept(GRANT, block_ids)
        self.address = self.reader.endpoint.address


@contextlib.contextmanager
def reading(region=None, block_ids=(5, 2), port=0):
    side = Reading(np.zeros((8, BLOCK), np.uint8) if region is None else region, block_ids, port)
    yield side
    side.reader.close()


class RawPeer:
    """A P that says what a test tells it to, on the test's own thread."""

    def __init__(self, address, greeting=GREETING + NONCE):
        self.lost = []
        self.results = []
        self.context = ucp.Context(ucp_library.Library(), is_local=True)
        self.worker = ucp.Worker(self.context, lambda *message: None, self.lost.append)
        self.worker.connect(*parse_address(address)[:2])
        if greeting is not None:
            self.say(greeting)

    def say(self, header, payload=b""):
        """Send, and wait until UCX has done so, one way or the other."""
        kept = np.frombuffer(payload, np.uint8)
        before = len(self.results)
        self.worker.send(header, kept.ctypes.data if payload else 0, len(payload), self.results.append)
        self.pump(lambda: len(self.results) > before)

    def piece(self, grant, offset, payload, size=None):
        self.say(wire.encode_header(grant, offset, len(payload) if size is None else size), payload)

    def pump(self, condition):
        def met():
            self.worker.progress()
            return condition()

        wait_until(met)

    def close(self):
        self.worker.close()
        self.context.close()


@contextlib.contextmanager
def raw_peer(address, **values):
    peer = RawPeer(address, **values)
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, str(Path(ucx_process.__file__)), *arguments]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


# --- what may reach a block ---


def test_blocks_that_are_no_divisor_of_a_piece_arrive_whole(tls):
    pair = Pair("ucx", layout=LARGE)
    ranges = [(0, 7 * 16, (9, 0, 33, 12, 50, 4, 60))]
    key = pair.run("r", 7 * 16, ranges)
    pair.check_bytes(key, ranges)
    assert pair.sender.statistics().num_bytes == 7 * LARGE.block_bytes
    pair.close()


def test_pieces_small_and_large_fill_the_blocks_in_the_order_of_the_grant(tls):
    run = np.random.default_rng(1).integers(0, 256, 2 * BLOCK, dtype=np.uint8).tobytes()
    with reading() as d, raw_peer(d.address) as peer:
        for start, end in ((BLOCK - 7, 2 * BLOCK), (0, 100), (100, BLOCK - 7)):
            peer.piece(GRANT, start, run[start:end])
        wait_until(lambda: d.events.count("all_in", GRANT))
        assert d.region[5].tobytes() + d.region[2].tobytes() == run
        assert not d.region[[0, 1, 3, 4, 6, 7]].any()


def test_doubled_and_overlapping_pieces_are_counted_once(tls):
    with reading() as d, raw_peer(d.address) as peer:
        for start, end in ((0, 100), (0, 100), (50, BLOCK), (0, BLOCK), (BLOCK + 9, 2 * BLOCK)):
            peer.piece(GRANT, start, b"\x07" * (end - start))
        wait_until(lambda: (d.region[2, 9:] == 7).all())
        assert not d.events.count("all_in")
        peer.piece(GRANT, BLOCK, b"\x07" * 9)
        wait_until(lambda: d.events.count("all_in", GRANT))


@pytest.mark.parametrize("size", [10, BLOCK], ids=["small", "large"])
def test_a_late_piece_does_not_touch_landed_blocks(tls, size):
    with reading() as d, raw_peer(d.address) as peer:
        peer.piece(GRANT, 0, b"\x01" * 2 * BLOCK)
        wait_until(lambda: d.events.count("all_in", GRANT))
        peer.piece(GRANT, 0, b"\x02" * size)
        wait_until(lambda: d.reader.num_dropped == 1)
        assert (d.region[[5, 2]] == 1).all()


@pytest.mark.parametrize("size", [10, BLOCK], ids=["small", "large"])
def test_a_piece_after_a_stop_does_not_touch_the_blocks(tls, size):
    """A06."""
    with reading() as d, raw_peer(d.address) as peer:
        peer.piece(GRANT, 0, b"\x01" * 10)
        wait_until(lambda: d.region[5, 0] == 1)
        assert d.reader.stop(GRANT)
        d.region[:] = 9
        peer.piece(GRANT, 10, b"\x02" * size)
        wait_until(lambda: d.reader.num_dropped == 1)
        assert (d.region == 9).all()


@pytest.mark.parametrize(
    "forge",
    [
        lambda peer: peer.piece(replace(GRANT, session_nonce=b"x" * 32), 0, b"1" * 8),
        lambda peer: peer.piece(replace(GRANT, grant_nonce=b"x" * 16), 0, b"1" * BLOCK),
        lambda peer: peer.piece(replace(GRANT, key=RequestKey("other", 0)), 0, b"1" * 8),
        lambda peer: peer.piece(replace(GRANT, key=RequestKey("r", 1)), 0, b"1" * 8),
        lambda peer: peer.piece(GRANT, 2 * BLOCK - 7, b"1" * 8),
        lambda peer: peer.piece(GRANT, 2**63, b"1" * BLOCK),
        lambda peer: peer.piece(GRANT, 0, b""),
        lambda peer: peer.piece(GRANT, 0, b"1" * 8, size=9),
        lambda peer: peer.piece(GRANT, 0, b"1" * 2**21),
        lambda peer: peer.say(b""),
        lambda peer: peer.say(b"\xff" * 100, b"1" * BLOCK),
        lambda peer: peer.say(b"x" * 1000),
    ],
    ids=["session", "grant", "request", "attempt", "end", "far", "empty", "size", "huge", "none", "noise", "long"],
)
def test_a_message_that_is_no_piece_or_not_meant_touches_nothing(forge):
    with reading() as d, raw_peer(d.address) as peer:
        forge(peer)
        wait_until(lambda: d.reader.num_dropped == 1)
        assert not d.region.any()
        peer.piece(GRANT, 0, b"\x05" * 2 * BLOCK)
        wait_until(lambda: d.events.count("all_in", GRANT))


# --- whose connections count ---


@pytest.mark.parametrize("greeting", [b"", b"kv", GREETING + b"x" * 32, NONCE, wire.encode_header(GRANT, 0, 8)])
def test_a_stranger_is_hung_up_on(greeting):
    with reading() as d:
        with raw_peer(d.address, greeting=greeting) as stranger:
            stranger.pump(lambda: stranger.lost)
        assert d.reader.num_dropped == 1
        with raw_peer(d.address) as peer:
            peer.piece(GRANT, 0, b"\x05" * 2 * BLOCK)
            wait_until(lambda: d.events.count("all_in", GRANT))
        assert not d.events.count("read_failed", b"")


def test_a_second_connection_of_one_session_is_hung_up_on_and_the_first_goes_on():
    with reading() as d, raw_peer(d.address) as peer:
        peer.piece(GRANT, 0, b"\x05" * BLOCK)
        wait_until(lambda: d.region[5].all())
        with raw_peer(d.address) as thief:
            thief.pump(lambda: thief.lost)
        peer.piece(GRANT, BLOCK, b"\x05" * BLOCK)
        wait_until(lambda: d.events.count("all_in", GRANT))
        assert not d.events.count("read_failed")


def test_the_right_grant_on_another_sessions_connection_touches_nothing():
    with reading() as d:
        d.reader.begin_session(b"t" * 32)
        with raw_peer(d.address, greeting=GREETING + b"t" * 32) as thief:
            thief.piece(GRANT, 0, b"\x01" * 2 * BLOCK)
            wait_until(lambda: d.reader.num_dropped == 1)
        assert not d.region.any()


def test_more_silent_strangers_than_are_allowed_leave_room_for_nobody_else_but_are_bounded(monkeypatch):
    monkeypatch.setattr("kvrelay.connector.transport.ucx_reader._MAX_STRANGERS", 2)
    with reading() as d, contextlib.ExitStack() as stack:
        for count in (1, 2):
            peer = stack.enter_context(raw_peer(d.address, greeting=None))
            peer.pump(lambda count=count: len(d.reader._connections) == count)
        refused = stack.enter_context(raw_peer(d.address, greeting=None))
        refused.pump(lambda: refused.lost)
        assert len(d.reader._connections) == 2


def test_a_session_that_ends_ends_its_connection_and_says_nothing_of_it():
    with reading() as d, raw_peer(d.address) as peer:
        peer.piece(GRANT, 0, b"\x05" * 10)
        wait_until(lambda: d.region[5, 0] == 5)
        d.reader.end_session(NONCE)
        peer.pump(lambda: peer.lost)
        assert not d.events.count("read_failed")


def test_a_reader_starts_again_on_the_address_it_had(tls):
    """B06."""
    with reading() as d, raw_peer(d.address) as peer:
        peer.piece(GRANT, 0, b"\x05" * 10)
        wait_until(lambda: d.region[5, 0] == 5)
        port = parse_address(d.address)[1]
        d.reader.close()
        with reading(port=port) as again, raw_peer(again.address) as next_peer:
            next_peer.piece(GRANT, 0, b"\x05" * 2 * BLOCK)
            wait_until(lambda: again.events.count("all_in", GRANT))


# --- stops ---


@contextlib.contextmanager
def writing(target, *, gate_of):
    """Four blocks on their way from one region to another, without a connector, and one end held inside a piece."""
    with reading(target, (0, 1, 2, 3)) as d:
        events = Recorder()
        writer = UcxWriter(np.ones_like(target), MonotonicClock())
        link = writer.connect(NONCE, d.address, events)
        if gate_of == "reader":
            gate = d.reader._scatter = Gate(d.reader._scatter)
        else:
            gate = link._pack = Gate(link._pack)
        link.write(GRANT, [Copy(i, i, i, 0, BLOCK) for i in range(4)])
        assert gate.entered.wait(20)
        yield d, link, events, gate
        writer.close()


def test_a_reader_inside_a_piece_is_not_idle_until_it_has_left(tls):
    """A06: the handshake between the thread that gives blocks up and the thread that writes into them."""
    with writing(np.zeros((4, BLOCK), np.uint8), gate_of="reader") as (d, _link, _events, gate):
        assert d.reader.stop(GRANT) is False
        assert not d.events.count("reader_idle")
        gate.let_go.set()
        wait_until(lambda: d.events.count("reader_idle", GRANT))
        assert not d.events.count("all_in")


def test_a_writer_inside_a_piece_is_not_idle_until_it_has_left(tls):
    """A07."""
    target = np.zeros((4, BLOCK), np.uint8)
    with writing(target, gate_of="writer") as (_d, link, events, gate):
        assert link.stop(GRANT) is False
        assert not events.count("writer_idle")
        gate.let_go.set()
        wait_until(lambda: events.count("writer_idle", GRANT))
        assert not events.count("written")
    assert not target.any()


# --- ends: no control connection helps ---


def big(fill=0):
    return np.full((NUM_BLOCKS, PIECE_BYTES), fill, np.uint8)


@pytest.mark.parametrize("what", ["write", "write_forever"], ids=["idle", "busy"])
def test_a_killed_writer_is_noticed_at_once_and_its_blocks_are_free(tls, what):
    with reading(big(), range(NUM_BLOCKS)) as d:
        with process(what, d.address) as child:
            wait_until(lambda: d.region[7].all())
            child.kill()
            killed_at = time.monotonic()
            wait_until(lambda: d.events.count("read_failed", NONCE))
            assert time.monotonic() - killed_at < AT_ONCE_S
        assert d.reader.stop(GRANT)
        assert not d.reader._connections


@pytest.mark.parametrize("what", ["write", "write_forever"], ids=["idle", "busy"])
def test_a_frozen_writer_keeps_neither_blocks_nor_close(tls, what):
    with reading(big(), range(NUM_BLOCKS)) as d, process(what, d.address) as child:
        wait_until(lambda: d.region[7].all())
        child.send_signal(signal.SIGSTOP)
        if not d.reader.stop(GRANT):
            wait_until(lambda: d.events.count("reader_idle", GRANT))
        d.region[:] = 9
        d.reader.end_session(NONCE)
        wait_until(lambda: not d.reader._connections)
        assert (d.region == 9).all()


def test_a_killed_reader_is_noticed_at_once(tls):
    with process("read") as child:
        events, writer = Recorder(), UcxWriter(big(1), MonotonicClock())
        link = writer.connect(NONCE, child.stdout.readline().strip(), events)
        link.write(GRANT, copies(0, 8))
        wait_until(lambda: events.num_written() == 8 * PIECE_BYTES)
        child.kill()
        killed_at = time.monotonic()
        wait_until(lambda: events.count("write_failed", NONCE))
        assert time.monotonic() - killed_at < AT_ONCE_S
        writer.close()


def test_a_frozen_reader_costs_a_bounded_number_of_buffers_and_holds_up_neither_stop_nor_close(tls):
    with process("read") as child:
        events, writer = Recorder(), UcxWriter(big(1), MonotonicClock())
        link = writer.connect(NONCE, child.stdout.readline().strip(), events)
        link.write(GRANT, copies(0, 8))
        wait_until(lambda: events.num_written() == 8 * PIECE_BYTES)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        link.write(GRANT, copies(8, NUM_BLOCKS))
        wait_until(lambda: link._num_buffers == MAX_PIECES and not link._free)
        assert link._num_buffers == MAX_PIECES
        assert link.stop(GRANT)
        link.close()
        assert link.join(5.0)
        assert events.num_written() == 8 * PIECE_BYTES  # what D has not fetched may not be committed
        assert not events.count("write_failed")
        child.kill()
        child.wait()
        wait_until(lambda: ucp.sweep(writer._library) or not writer._library.unclosed)
        writer.close()


def test_with_too_many_connections_to_frozen_peers_no_new_one_is_made():
    class Frozen:
        def try_destroy(self):
            return self.is_awake

        is_awake = False

    with reading() as d:
        writer, events = UcxWriter(big(), MonotonicClock()), Recorder()
        frozen = [Frozen() for _ in range(ucp.MAX_UNCLOSED)]
        writer._library.unclosed.extend(frozen)
        writer.connect(NONCE, d.address, events)
        wait_until(lambda: events.count("write_failed", NONCE))
        frozen[0].is_awake = True
        link = writer.connect(NONCE, d.address, events)
        wait_until(lambda: link._is_greeted)
        writer._library.unclosed.clear()
        writer.close()


def test_nobody_at_the_address_is_a_failed_write():
    with reading() as d:
        address = d.address
    for wrong in (address, "no port", "host.invalid:1"):
        events, writer = Recorder(), UcxWriter(big(), MonotonicClock())
        writer.connect(NONCE, wrong, events)
        wait_until(lambda events=events: events.count("write_failed", NONCE))
        writer.close()
        assert events.count("write_failed") == 1


# --- who is reached ---


def test_auto_reaches_only_where_both_have_rdma_and_beyond_loopback_only_if_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ucp_library, "INFINIBAND", tmp_path)
    here, there = "127.0.0.1:1", "10.0.0.1:1"
    named = UcxWriter(big(), MonotonicClock())
    auto = UcxWriter(big(), MonotonicClock(), rdma_only=True, insecure=True)
    assert named.reaches(here)
    assert not named.reaches(there)
    assert not named.reaches("nonsense")
    assert not auto.reaches(format_address(there, rdma=True))
    (tmp_path / "mlx5_0").mkdir()
    assert auto.reaches(format_address(there, rdma=True))
    assert not auto.reaches(there)


def test_beyond_loopback_ucx_is_offered_only_if_told_so():
    with pytest.raises(ConfigError, match="--insecure"):
        make_receiver(region=np.zeros((4, LAYOUT.block_bytes), np.uint8), bind="0.0.0.0", transport="ucx", **COMMON)


def test_without_libucp_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ucp_library, "_load_system", lambda: None)
    monkeypatch.setattr(ucp_library, "_load_wheel", lambda: None)
    with pytest.raises(ConfigError, match=r"kvrelay\[ucx\]"):
        make_sender(region=np.zeros((4, LAYOUT.block_bytes), np.uint8), transport="ucx", **COMMON)


def test_a_port_that_is_taken_is_a_config_error():
    with reading() as d, pytest.raises(ConfigError, match="cannot listen"):
        UcxReader(big(), MonotonicClock(), "127.0.0.1", parse_address(d.address)[1], "")


def test_a_name_without_an_address_is_an_error_of_ours():
    with pytest.raises(Unavailable, match=r"host\.invalid"):
        ucp.socket_address("host.invalid", 1)


def test_without_rdma_auto_loads_no_ucx():
    code = """
import numpy as np
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.engine.kv_layout import KVLayout
layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
values = {"region": np.zeros((4, layout.block_bytes), np.uint8), "layout": layout, "fingerprint": "m", "epoch": "e"}
for make in (make_sender, make_receiver):
    make(**values, secret="", wake_up=lambda: None).close()
print("libucp.so" in open("/proc/self/maps").read())
"""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == str(ucp_library.has_rdma())
