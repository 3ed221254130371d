"""Control messages on a shared-memory connection's Unix socket: whole, in order, both ways, from any thread.

A message goes out on the thread that says it, so that nobody has to be woken for it; what the kernel does not take at
once waits in a bounded queue for the loop. It is cut into fragments: a socket takes no more than its buffer at once.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable

import zmq

from kvrelay.connector.loop import Loop
from kvrelay.connector.wire import MAX_MESSAGE_BYTES
from kvrelay.engine.errors import InvalidArgument

FRAGMENT_BYTES = 2**15
_MAX_QUEUED = 4096  # fragments
_LAST, _MORE = b"L", b"M"


class Talk:
    """One end of a connection. `watch`, `read` and `close` are for the loop's thread only."""

    def __init__(self, loop: Loop, connection: socket.socket, on_ready: Callable[[], None]) -> None:
        """`on_ready`: something is to be read, or the connection has ended."""
        self.socket = connection
        self._loop = loop
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards the next two, and the socket's end
        self._queued: deque[bytes] = deque()
        self._closed = False
        self._flags = 0
        self._heard: list[bytes] = []

    def say(self, message: bytes) -> bool:
        """Any thread. Whether it is on its way, or the connection has ended; else the peer reads nothing."""
        fragments = [message[i : i + FRAGMENT_BYTES] for i in range(0, len(message), FRAGMENT_BYTES)]
        with self._lock:
            if self._closed:
                return True
            if len(self._queued) + len(fragments) > _MAX_QUEUED:
                return False
            self._queued.extend(_MORE + fragment for fragment in fragments[:-1])
            self._queued.append(_LAST + fragments[-1])
            is_all_out = self._flush()
        if not is_all_out:
            self._loop.post(self.watch)
        return True

    def watch(self) -> None:
        """Hear of what is to be read, and of room while something waits for it."""
        with self._lock:
            flags = 0 if self._closed else zmq.POLLIN | (zmq.POLLOUT if self._queued else 0)
        if flags != self._flags:
            if self._flags:
                self._loop.unwatch(self.socket.fileno())
            self._flags = flags
            if flags:
                self._loop.watch(self.socket.fileno(), flags, self._ready)

    def read(self) -> bytes | None:
        """The next message, if all of it is here; nothing (b"") at the connection's end, None if there is none yet.

        Raises: InvalidArgument for what is no fragment, or of a message larger than any.
        """
        while True:
            try:
                fragment = self.socket.recv(FRAGMENT_BYTES + 2)
            except BlockingIOError:
                return None
            except OSError:
                return b""
            if not fragment:
                return b""
            if fragment[:1] not in (_LAST, _MORE) or not 1 < len(fragment) <= FRAGMENT_BYTES + 1:
                raise InvalidArgument("fragment", fragment[:8], "is none")
            self._heard.append(fragment[1:])
            if len(self._heard) > MAX_MESSAGE_BYTES // FRAGMENT_BYTES + 1:
                raise InvalidArgument("message", len(self._heard), "has too many fragments")
            if fragment[:1] == _LAST:
                message, self._heard = b"".join(self._heard), []
                return message

    def close(self) -> None:
        """What has been said and the kernel has taken still reaches the peer."""
        with self._lock:
            self._closed = True
            self._queued.clear()
        if self._flags:
            self._loop.unwatch(self.socket.fileno())
            self._flags = 0
        self.socket.close()

    def _ready(self) -> None:
        if self._queued:
            with self._lock:
                self._flush()
            self.watch()
        self._on_ready()

    def _flush(self) -> bool:
        """Whether nothing is left. With the lock held."""
        while self._queued:
            try:
                self.socket.send(self._queued[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:  # it has ended: whoever reads it will see
                self._queued.clear()
                return True
            self._queued.popleft()
        return True
