"""What a writer has still to do, shared by those who ask and the one thread that does it."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvrelay.connector.messages import GrantId

Item = TypeVar("Item")


class InHand:
    """Which grant one thread is touching blocks for: the handshake behind "idle".

    The lock is held for look-ups only, never while bytes move.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._grant: GrantId | None = None
        self._stopped = False

    def begin(self, grant: GrantId) -> None:
        """The thread is about to touch the grant's blocks. With the lock held."""
        self._grant, self._stopped = grant, False

    def end(self) -> bool:
        """The thread has left them. Whether the grant was stopped meanwhile. With the lock held."""
        self._grant = None
        stopped, self._stopped = self._stopped, False
        return stopped

    def stop(self, grant: GrantId) -> bool:
        """Whether the thread is idle on the grant; if not, `end` will tell the thread. With the lock held."""
        if self._grant != grant:
            return True
        self._stopped = True
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether what is in hand was stopped: the thread is to leave it. With the lock held."""
        return self._stopped


class WriteQueue(Generic[Item]):
    """Pieces of work in order, each under its grant. They are made when their turn comes, on the thread."""

    def __init__(self) -> None:
        self._in_hand = InHand()
        self._batches: deque[tuple[GrantId, Iterator[Item]]] = deque()

    def __bool__(self) -> bool:
        """Whether there may be something."""
        return bool(self._batches)

    def put(self, grant: GrantId, items: Iterable[Item]) -> None:
        with self._in_hand.lock:
            self._batches.append((grant, iter(items)))

    def begin(self) -> tuple[GrantId, Item] | None:
        """The next piece, in hand from now on; None if there is none."""
        with self._in_hand.lock:
            while self._batches:
                grant, items = self._batches[0]
                for item in items:
                    self._in_hand.begin(grant)
                    return grant, item
                self._batches.popleft()
            return None

    def is_stopped(self) -> bool:
        """Whether the grant of what is in hand has been stopped."""
        with self._in_hand.lock:
            return self._in_hand.is_stopped

    def end(self) -> bool:
        """The source blocks of what was in hand are read no more; whether its grant was stopped meanwhile."""
        with self._in_hand.lock:
            return self._in_hand.end()

    def stop(self, grant: GrantId) -> bool:
        """Forget the grant's pieces. Whether the thread is idle on it already; else `end` will say so to the thread."""
        with self._in_hand.lock:
            self._batches = deque(batch for batch in self._batches if batch[0] != grant)
            return self._in_hand.stop(grant)

    def clear(self) -> None:
        with self._in_hand.lock:
            self._batches.clear()
