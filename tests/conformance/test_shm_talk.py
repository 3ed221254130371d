"""Control messages on shared memory's Unix socket."""

import contextlib
import socket
import threading

import pytest
from support.connector import LAYOUT, Pair, wait_until

from kvrelay.connector.base import Failed, Released, SessionLost, SessionUp
from kvrelay.connector.loop import Loop
from kvrelay.connector.transport import shm_talk
from kvrelay.connector.transport.shm_talk import FRAGMENT_BYTES, Talk
from kvrelay.connector.wire import MAX_MESSAGE_BYTES
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.errors import InvalidArgument

B = LAYOUT.block_size


class End:
    """One end, and what it has heard."""

    def __init__(self, connection):
        connection.setblocking(False)
        self.heard = []
        self.loop = Loop("kv-test", MonotonicClock())
        self.talk = Talk(self.loop, connection, self.read)
        self.reads = threading.Event()
        self.loop.start()

    def listen(self):
        self.reads.set()
        self.loop.post(self.talk.watch)

    def read(self):
        while (message := self.talk.read()) is not None:
            self.heard.append(message)
            if not message:
                self.talk.close()
                return

    def close(self):
        self.loop.post(self.talk.close)
        assert self.loop.stop(20)


@pytest.fixture
def ends():
    one, two = (End(connection) for connection in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, two
    one.close()
    two.close()


def test_messages_of_any_size_come_whole_and_in_order_both_ways(ends):
    sizes = [1, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 3 * FRAGMENT_BYTES, MAX_MESSAGE_BYTES, 2]
    messages = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    for end in ends:
        end.listen()
        for message in messages:
            assert end.talk.say(message)
    for end in ends:
        wait_until(lambda end=end: len(end.heard) == len(sizes))
        assert end.heard == messages


def test_what_several_threads_say_is_not_mixed(ends):
    one, two = ends
    two.listen()

    def say(number):
        for _ in range(50):
            assert one.talk.say(bytes([number]) * (2 * FRAGMENT_BYTES + number))

    threads = [threading.Thread(target=say, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(two.heard) == 150)
    assert all(message == message[:1] * (2 * FRAGMENT_BYTES + message[0]) for message in two.heard)


def test_a_peer_that_reads_nothing_is_given_up_with_a_bounded_queue(ends):
    one, two = ends
    while one.talk.say(b"x" * FRAGMENT_BYTES):
        assert len(one.talk._queued) <= shm_talk._MAX_QUEUED
    two.listen()  # it reads after all: what was taken comes whole
    wait_until(lambda: len(two.heard) >= shm_talk._MAX_QUEUED)
    assert set(two.heard) == {b"x" * FRAGMENT_BYTES}


def test_the_end_comes_behind_what_was_said(ends):
    one, two = ends
    assert one.talk.say(b"last words")
    one.loop.post(one.talk.close)
    two.listen()
    wait_until(lambda: two.heard == [b"last words", b""])
    assert one.talk.say(b"nobody hears this")


@pytest.mark.parametrize(
    "fragments",
    [
        [b"X1"],
        [b"L"],
        [b"L" + b"1" * (FRAGMENT_BYTES + 1)],
        [b"M" + b"1" * 9] * (MAX_MESSAGE_BYTES // FRAGMENT_BYTES + 2),
    ],
    ids=["kind", "empty", "too large", "too many"],
)
def test_what_is_no_message_is_refused_before_it_takes_memory(fragments):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        talk = Talk(Loop("kv-test", MonotonicClock()), ours, lambda: None)
        for fragment in fragments[:-1]:
            theirs.send(fragment)
            assert talk.read() is None
        theirs.send(fragments[-1])
        with pytest.raises(InvalidArgument):
            talk.read()
        talk._loop.stop(0)


@pytest.fixture
def pair(caplog):
    pair = Pair("shm")
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def test_a_transfers_messages_take_this_way_alone(pair):
    """So that none can overtake another."""
    said = []
    for carrier in (pair.receiver._acceptor, pair.sender._peers[pair.d_values["epoch"]].dialer):
        send = carrier._send_in
        carrier._send_in = lambda *args, send=send: (said.append(args), send(*args))
    pair.run("r", 2 * B, [(0, 2 * B, (1, 2))])
    key = pair.begin("s", B, [(0, B, (3,))])
    pair.cancel_d(key)
    pair.d.wait(Released, key)
    assert not said


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("message", [b"X", b"Ljunk"], ids=["no fragment", "no message"])
def test_a_malformed_message_ends_the_session_and_the_next_one_serves(pair, side, message):
    key = pair.begin("r", B, [(0, B, (1,))])
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    link = pair.sender._peers[pair.d_values["epoch"]].link
    (connection,) = pair.receiver._readers["shm"]._connections
    with contextlib.suppress(BlockingIOError):
        (link._talk if side == "p" else connection.talk).socket.send(message)
    for end in (pair.p, pair.d):
        end.wait(SessionLost)
        assert end.wait(Failed, key).retryable
        end.wait(Released, key)
        end.wait(SessionUp, count=2)
    pair.run("next", B, [(0, B, (1,))])
