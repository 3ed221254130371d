"""Shared memory: who may have D's pool, what may reach a block of it, and how D learns that P can write no more."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import shm_process
from support.connector import LAYOUT, Pair, SteppedClock, shared_region, wait_until
from support.peer_process import COMMON
from support.recorder import Recorder

from kvrelay.connector.base import Failed, FailReason, Offered, Quarantined, Released, SessionLost, SessionUp
from kvrelay.connector.factory import make_receiver
from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport import shm, shm_reader, shm_wire
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.shm import ShmWriter
from kvrelay.connector.transport.shm_reader import ShmReader
from kvrelay.connector.transport.shm_wire import PoolShape
from kvrelay.engine.clock import FakeClock, MonotonicClock
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.request import RequestKey
from kvrelay.engine.shared_memory import HUGE_PAGE_BYTES, SharedMemory, why_not_huge

BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 10
SECRET = COMMON["secret"]
NONCE = b"s" * 32
GRANT = GrantId(NONCE, b"g" * 16, RequestKey("r", 0))


class D:
    """A reader alone, and its pool."""

    def __init__(self, clock=None):
        self.region, self.descriptor = shared_region((NUM_BLOCKS, BLOCK))
        self.heard = Recorder()
        self.clock = clock or MonotonicClock()
        self.reader = ShmReader(self.region, self.descriptor, self.clock, SECRET)
        self.reader.start(self.heard)
        self.address = self.reader.endpoint.address
        self.path = shm_wire.path_on_this_host(self.address)

    def stranger(self, message=b""):
        """A raw connection that has sent this message."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(self.path)
        if message:
            connection.send(message)
        return connection


@pytest.fixture
def d(caplog):
    d = D()
    yield d
    d.reader.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


class P:
    """A writer alone, and its pool."""

    def __init__(self, region=None, secret=SECRET):
        self.region = np.arange(NUM_BLOCKS * BLOCK, dtype=np.uint64).astype(np.uint8) | 1 if region is None else region
        self.region = self.region.reshape(-1, BLOCK)
        self.heard = Recorder()
        self.writer = ShmWriter(self.region, MonotonicClock(), secret)

    def connect(self, address, nonce=NONCE):
        return self.writer.connect(nonce, address, self.heard)


@pytest.fixture
def p():
    p = P()
    yield p
    p.writer.close()


@pytest.fixture
def link(d, p):
    d.reader.begin_session(NONCE)
    return p.connect(d.address)


def whole(source, target):
    return Copy(source, target, 0, 0, BLOCK)


# --- what may reach a block


def test_copies_queued_before_the_pool_has_come_are_written_and_nothing_else(d, p, link):
    link.write(GRANT, [whole(1, 7), Copy(2, 3, 1, 16, 100), whole(4, 0)])
    wait_until(lambda: p.heard.num_written() == 2 * BLOCK + 100)
    expected = np.zeros_like(d.region)
    expected[7], expected[0] = p.region[1], p.region[4]
    expected[3, 16:116] = p.region[2, 16:116]
    assert np.array_equal(d.region, expected)


def test_nothing_to_write_is_nothing(d, p, link):
    link.write(GRANT, [])
    link.write(GRANT, [whole(1, 1)])
    wait_until(lambda: p.heard.num_written() == BLOCK)
    assert link.stop(GRANT)


@pytest.mark.parametrize(
    "wrong",
    [
        Copy(0, NUM_BLOCKS, 0, 0, BLOCK),
        Copy(0, 2**40, 0, 0, BLOCK),
        Copy(0, -1, 0, 0, BLOCK),
        Copy(0, 5, 0, 1, BLOCK),
        Copy(0, 5, 0, 0, BLOCK + 1),
        Copy(0, 5, 0, -8, 8),
        Copy(0, 5, 0, 2**62, 2**62),
        Copy(0, 5, 0, 0, -1),
        Copy(NUM_BLOCKS, 5, 0, 0, BLOCK),
    ],
    ids=["behind", "far behind", "before", "into the next", "larger", "from before", "overflow", "negative", "source"],
)
def test_a_copy_outside_one_block_of_the_pool_fails_the_session_and_is_not_written(d, p, link, wrong):
    """P's own check: nobody can check a one-sided write for it, whatever D has granted."""
    link.write(GRANT, [wrong, whole(2, 2)])
    wait_until(lambda: p.heard.has("write_failed", NONCE))
    link.write(GRANT, [whole(1, 1)])
    assert not p.heard.has("written")
    link.close()
    assert link.join(20)
    assert not d.region.any()
    assert link.stop(GRANT)
    wait_until(lambda: d.heard.has("fenced", NONCE))


@pytest.mark.parametrize("sizes", [[6 * 2**20, 6 * 2**20, 5, 2**20], [1], [2**23], [], [2**24, 2**24]])
def test_batches_hold_every_copy_once_and_in_order(sizes):
    copies = [Copy(i, i + 1, i, 2, size) for i, size in enumerate(sizes)]
    batches = list(shm._batches(copies))
    assert [row.tolist() for batch in batches for row in batch] == [[i, i + 1, 2, size] for i, size in enumerate(sizes)]
    assert all(len(batch) for batch in batches)
    assert all(batch[:, 3].sum() < 2 * shm._BATCH_BYTES or len(batch) == 1 for batch in batches)


def test_a_writer_inside_a_copy_is_not_idle_until_it_has_left(d):
    """A07."""
    inside, let_go = threading.Event(), threading.Event()
    p = P()

    def slow(pieces):
        inside.set()
        assert let_go.wait(20)

    p.writer._copy_pieces = slow
    d.reader.begin_session(NONCE)
    link = p.connect(d.address)
    link.write(GRANT, [whole(i, i) for i in range(4)])
    assert inside.wait(20)
    assert link.stop(GRANT) is False
    assert not p.heard.has("writer_idle")
    let_go.set()
    wait_until(lambda: p.heard.has("writer_idle", GRANT))
    assert not p.heard.has("written")
    p.writer.close()


def test_close_waits_for_the_copy_in_hand_before_d_hears_that_the_pool_is_unmapped(d):
    """A06: the connection's end is P's word that it can write no more."""
    inside, let_go = threading.Event(), threading.Event()
    p = P()

    def slow(pieces):
        inside.set()
        assert let_go.wait(20)

    p.writer._copy_pieces = slow
    d.reader.begin_session(NONCE)
    link = p.connect(d.address)
    link.write(GRANT, [whole(1, 1)])
    assert inside.wait(20)
    link.close()
    with d.stranger(b"who") as stranger:
        assert stranger.recv(1) == b""  # D has served its sockets since
    assert not d.heard.has("fenced")
    let_go.set()
    wait_until(lambda: d.heard.has("fenced", NONCE))
    p.writer.close()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("size", [1, 63, 2047, 2048, 2049, 4097, 70_001])
def test_pieces_of_any_size_at_any_address_are_copied_and_no_byte_beside(is_compiled, size):
    from kvrelay.engine import copies
    from kvrelay.kernels.cpu.build import NotBuiltError, load

    copy_pieces = copies._copy_one_by_one
    if is_compiled:
        try:
            load()
        except NotBuiltError as error:
            pytest.skip(str(error))
        copy_pieces = copies.get_copy_pieces()
        assert copy_pieces is not copies._copy_one_by_one
    source = np.random.default_rng(size).integers(1, 256, 3 * (size + 200), dtype=np.uint8)
    target = np.zeros_like(source)
    expected = target.copy()
    places = [(7, 3), (size + 100, size + 131), (2 * size + 200, 2 * size + 264)]
    for start, end in places:
        expected[end : end + size] = source[start : start + size]
    pieces = [[source.ctypes.data + start, target.ctypes.data + end, size] for start, end in places]
    copy_pieces(np.array(pieces, np.uint64))
    assert np.array_equal(target, expected)


# --- who may have the pool


def hello(nonce=NONCE, secret=SECRET):
    return shm_wire.write_hello(nonce, secret)


@pytest.mark.parametrize(
    "message",
    [
        hello(b"t" * 32),
        hello(secret="another"),
        b"x",
        hello() + b"x",
        b"\0" * shm_wire.HELLO_BYTES,
        hello()[:-1] + b"x",
    ],
    ids=["no session", "secret", "short", "long", "zeros", "proof"],
)
def test_who_is_not_the_p_of_an_open_session_gets_nothing_and_is_counted(d, message):
    d.reader.begin_session(NONCE)
    with d.stranger(message) as stranger:
        assert socket.recv_fds(stranger, 100, 1)[:2] == (b"", [])
    assert d.reader.num_dropped == 1
    assert not d.heard.heard
    with d.stranger(hello()) as theirs:
        assert shm_wire.receive_pool(theirs)[0] == PoolShape(NUM_BLOCKS, BLOCK)


def test_a_session_gets_the_pool_once(d):
    d.reader.begin_session(NONCE)
    with d.stranger(hello()) as first, d.stranger(hello()) as second:
        shape, descriptor = shm_wire.receive_pool(first)
        os.close(descriptor)
        assert shape == PoolShape(NUM_BLOCKS, BLOCK)
        assert second.recv(100) == b""


def test_an_ended_session_gets_nothing(d):
    d.reader.begin_session(NONCE)
    d.reader.end_session(NONCE)
    assert d.heard.has("fenced", NONCE)  # nobody has come for the pool, so nobody can write
    with d.stranger(hello()) as late:
        assert late.recv(100) == b""


def test_another_users_process_gets_nothing(d, monkeypatch):
    monkeypatch.setattr(shm_wire.os, "geteuid", lambda: 12345)
    d.reader.begin_session(NONCE)
    with d.stranger() as stranger:
        assert stranger.recv(100) == b""
    assert not ShmWriter(d.region, MonotonicClock(), SECRET).reaches(d.address)


def test_silent_strangers_are_bounded_and_shown_out():
    clock = FakeClock()
    d = D(clock)
    silent = [d.stranger() for _ in range(shm_reader._MAX_STRANGERS)]
    with d.stranger() as one_more:
        assert one_more.recv(1) == b""
    clock.advance(shm_wire.HANDSHAKE_S)
    d.reader._loop.wake()
    for stranger in silent:
        assert stranger.recv(1) == b""
        stranger.close()
    d.reader.begin_session(NONCE)
    with d.stranger(hello()) as theirs:
        os.close(shm_wire.receive_pool(theirs)[1])
    d.reader.close()


def test_the_socket_lies_where_no_other_user_can_enter_and_is_gone_at_the_end(d):
    folder = os.path.dirname(d.path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(d.path).st_mode) == 0o600
    d.reader.close()
    assert not os.path.exists(folder)


def test_a_folder_whose_path_is_too_long_for_a_socket_is_passed_over(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    d = D()
    assert ShmWriter(d.region, MonotonicClock(), SECRET).reaches(d.address)
    assert not list(long.iterdir())
    d.reader.close()


def test_p_reaches_what_is_there_on_this_host_and_nothing_else(d, p):
    assert p.writer.reaches(d.address)
    host, _, path = d.address.partition(":")
    for elsewhere in (f"other:{path}", f"{host}:{path}x", f"{host}:/etc/passwd", path, "", ":", "x" * 500):
        assert not p.writer.reaches(elsewhere)
    with d.stranger() as probe:  # what looked whether D is there was no fault
        probe.close()
    d.reader.close()
    assert not p.writer.reaches(d.address)
    assert d.reader.num_dropped == 0


def test_memory_that_cannot_be_shared_is_left_out_unless_it_is_asked_for():
    region = np.zeros((NUM_BLOCKS, BLOCK), np.uint8)
    values = {"region": region, "epoch": "d", "wake_up": lambda: None, **COMMON}
    receiver = make_receiver(**values)
    assert "shm" not in receiver._readers
    receiver.close()
    with pytest.raises(ConfigError, match="cannot be shared"):
        make_receiver(**values, transport="shm")


# --- the memory


def test_nobody_can_cut_the_pool_off_under_the_other(d):
    d.reader.begin_session(NONCE)
    with d.stranger(hello()) as theirs:
        _, descriptor = shm_wire.receive_pool(theirs)
    for size in (0, NUM_BLOCKS * BLOCK - 1, 2**30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


@contextlib.contextmanager
def forged_d(tmp_path, shape, descriptor):
    """A D that hands this out as its pool."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "pool"))
    listener.listen()

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(1000):
                        shm_wire.send_pool(connection, shape, descriptor)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield shm_wire.make_address(str(tmp_path / "pool"))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize("wrong", ["unsealed", "less than it says", "no memory at all"])
def test_a_pool_that_could_be_cut_off_or_is_none_is_not_mapped(p, tmp_path, wrong):
    memory = SharedMemory.create(BLOCK, "kvrelay-test")
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, BLOCK)
    shape = PoolShape(2 if wrong == "less than it says" else 1, BLOCK)
    null = os.open("/dev/null", os.O_RDWR)
    descriptor = {"unsealed": unsealed, "no memory at all": null}.get(wrong, memory.descriptor)
    with forged_d(tmp_path, shape, descriptor) as address:
        assert p.writer.reaches(address)
        p.connect(address)
        wait_until(lambda: p.heard.has("write_failed", NONCE))
        # What this process cannot map it does not try again: the next session's bytes go another way.
        assert p.writer.reaches(address) == (wrong != "unsealed")
    os.close(unsealed)
    os.close(null)


def test_shared_memory_lies_in_huge_pages_if_the_system_has_them():
    if reason := why_not_huge():
        pytest.skip(reason)
    memory = SharedMemory.create(3 * HUGE_PAGE_BYTES + 5, "kvrelay-test")
    view = np.frombuffer(memory.buffer, np.uint8)
    view[HUGE_PAGE_BYTES : 2 * HUGE_PAGE_BYTES : 4096] = 7
    memory.populate(lambda: False)
    assert memory.num_small_pieces == 0
    assert (view[HUGE_PAGE_BYTES : 2 * HUGE_PAGE_BYTES : 4096] == 7).all()
    assert np.count_nonzero(view) == HUGE_PAGE_BYTES // 4096
    mapped = Path("/proc/self/smaps").read_text().split(f"{memory.address:x}-", 1)[1]
    assert int(mapped.split("ShmemPmdMapped:", 1)[1].split()[0]) == 3 * HUGE_PAGE_BYTES // 1024


def test_a_view_keeps_the_memory_and_its_end_gives_it_back():
    memory = SharedMemory.create(5000, "kvrelay-test")
    view, descriptor = np.frombuffer(memory.buffer, np.uint8), memory.descriptor
    del memory
    view[:] = 1
    os.fstat(descriptor)
    del view
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# --- ends


def test_d_ends_a_session_and_p_unmaps_the_pool(d, p, link):
    link.write(GRANT, [whole(1, 1)])
    wait_until(lambda: p.heard.num_written() == BLOCK)
    d.reader.end_session(NONCE)
    wait_until(lambda: p.heard.has("write_failed", NONCE))
    wait_until(lambda: d.heard.has("fenced", NONCE))
    link.write(GRANT, [whole(2, 2)])
    link.close()
    assert link.join(20)
    assert not d.region[2].any()


def test_two_sessions_end_apart(d, p):
    other = b"t" * 32
    for nonce in (NONCE, other):
        d.reader.begin_session(nonce)
    first, second = p.connect(d.address), p.connect(d.address, other)
    for link in (first, second):
        link.write(GRANT, [whole(1, 1)])
    wait_until(lambda: p.heard.num_written() == 2 * BLOCK)
    first.close()
    wait_until(lambda: d.heard.has("fenced", NONCE))
    assert not d.heard.has("fenced", other)
    second.write(GRANT, [whole(2, 2)])
    wait_until(lambda: p.heard.num_written() == 3 * BLOCK)


def test_the_loss_of_d_is_a_failed_write_at_once(d, p, link):
    link.write(GRANT, [whole(1, 1)])
    wait_until(lambda: p.heard.num_written() == BLOCK)
    d.reader.close()
    wait_until(lambda: p.heard.has("write_failed", NONCE))


def test_a_d_that_hands_out_no_pool_is_given_up(monkeypatch, tmp_path):
    clock = FakeClock()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "pool"))
    listener.listen()
    heard = Recorder()
    writer = ShmWriter(np.zeros((1, BLOCK), np.uint8), clock, SECRET)
    link = writer.connect(NONCE, shm_wire.make_address(str(tmp_path / "pool")), heard)
    link.write(GRANT, [whole(0, 0)])
    connection, _ = listener.accept()
    assert connection.recv(1000) == hello()
    wait_until(lambda: link._timer is not None)
    clock.advance(shm_wire.HANDSHAKE_S)
    link._loop.wake()
    wait_until(lambda: heard.has("write_failed", NONCE))
    assert connection.recv(1) == b""
    writer.close()
    connection.close()
    listener.close()


@contextlib.contextmanager
def process(*arguments):
    command = [sys.executable, str(Path(shm_process.__file__)), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.chaos
@pytest.mark.parametrize("has_peer_descriptors", [True, False])
def test_the_exit_of_p_is_seen_though_a_child_of_its_holds_the_connection(d, monkeypatch, has_peer_descriptors):
    """By the kernel's word of the process, not by the connection's end, which does not come."""
    if not has_peer_descriptors:  # before Linux 6.5
        monkeypatch.setattr(shm_wire, "_SO_PEERPIDFD", 9999)
    d.reader.begin_session(NONCE)
    with process("shared", d.address, NONCE.hex()) as child:
        said = [child.stdout.readline().split() for _ in range(2)]
        (grandchild,) = (int(words[1]) for words in said if words[0] == "child")
        wait_until(lambda: (d.region[3] == 1).all())
        child.kill()
        wait_until(lambda: d.heard.has("fenced", NONCE))
        wait_until(lambda: d.heard.has("read_failed", NONCE))
        os.kill(grandchild, 0)  # it is there
        os.kill(grandchild, 9)


@pytest.mark.chaos
def test_a_p_killed_in_the_middle_of_a_copy_touches_no_other_block_and_leaves_its_own_for_nobody_until_it_is_gone():
    """A06."""
    pair = Pair("shm", connect=False)
    pair.sender.close()
    pair.p_values["epoch"] = "p"
    pair.d.region[:] = 0xA5
    with process("stuck", pair.receiver.address(), "p", pair.d_values["epoch"]) as child:
        pair.d.wait(SessionUp)
        granted = (3, 60, 7, 8, 20, 21, 22, 40, 41, 0)
        key = RequestKey("killed", 0)
        pair.expect("killed", 10 * LAYOUT.block_size, digest=b"d" * 16)
        pair.d.wait(Offered)
        pair.grant(key, [(0, 10 * LAYOUT.block_size, granted)])
        assert child.stdout.readline() == "in the middle\n"
        session = pair.receiver._peers["p"].session
        pair.receiver._acceptor.close_session(session, "the test cut it")
        assert pair.d.wait(Failed, key).reason == FailReason.PEER_LOST
        pair.d.wait(Quarantined, key)
        assert pair.receiver.statistics().num_quarantined_blocks == len(granted)
        assert not pair.d.of(Released, key)
        child.kill()
        pair.d.wait(Released, key)
    assert pair.receiver.statistics().num_quarantined_blocks == 0
    others = [block for block in range(len(pair.d.region)) if block not in granted]
    assert (pair.d.region[others] == 0xA5).all()
    half = LAYOUT.block_bytes // 2
    assert (pair.d.region[3, :half] == 1).all()
    assert (pair.d.region[3, half:] == 0xA5).all()
    pair.close()


def test_blocks_of_a_lost_session_come_back_when_p_has_unmapped_the_pool():
    """Before P's next HELLO, which a stopped clock keeps away."""
    pair = Pair("shm", clock=SteppedClock())
    size = LAYOUT.block_size
    key = pair.begin("r", 2 * size, [(0, 2 * size, (1, 2))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    session = pair.receiver._peers[pair.p_values["epoch"]].session
    (peer,) = pair.sender._peers.values()
    may_unmap = threading.Event()
    peer.link._loop.post(lambda: may_unmap.wait(20))
    with pair.sender._lock:  # P hears nothing
        pair.receiver._acceptor.close_session(session, "the test cut it")
        pair.d.wait(Quarantined, key)
        assert pair.receiver.statistics().num_quarantined_blocks == 2
        assert not pair.d.of(Released, key)
    may_unmap.set()
    pair.d.wait(Released, key)
    pair.p.wait(SessionLost)
    pair.p.wait(Released, key)
    pair.close()


def test_what_a_killed_reader_left_behind_is_removed_at_the_next_start_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def begin(name, *, hours_ago):
        folder = tmp_path / f"kvrelay-{name}"
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "pool"))
        listener.listen(1)
        os.utime(folder, (time.time() - 3600 * hours_ago,) * 2)
        return listener

    begin("killed", hours_ago=1).close()
    begin("just-now", hours_ago=0).close()
    (tmp_path / "kvrelay-empty").mkdir()
    with contextlib.closing(begin("alive", hours_ago=1)):
        region, descriptor = shared_region((4, BLOCK))
        reader = ShmReader(region, descriptor, MonotonicClock(), "s")
        left = {path.name for path in tmp_path.iterdir()} - {Path(reader._folder).name}
        reader.close()
    assert left == {"kvrelay-just-now", "kvrelay-empty", "kvrelay-alive"}
