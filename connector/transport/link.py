"""What the links of all transports share: work in a queue, one thread that does it, and an end of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport.base import Copy, WriterEvents
from kvrelay.connector.transport.queue import Item, WriteQueue
from kvrelay.engine.clock import Clock
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

_STOP_S = 5.0


class QueuedLink(ABC, Generic[Item]):
    """P's end of one session's data connection, on a thread of its own.

    `write`, `stop` and `close` may be called from any thread; what a transport adds runs on the link's.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        session_nonce: bytes,
        address: str,
        events: WriterEvents,
        cut: Callable[[Sequence[Copy]], Iterable[Item]],
    ) -> None:
        """`cut`: makes of copies what the thread takes in hand at once."""
        self._session_nonce = session_nonce
        self._address = address
        self._events = events
        self._cut = cut
        self._queue: WriteQueue[Item] = WriteQueue()
        self._loop = Loop(f"kv-write-{name}", clock)

    def start(self) -> None:
        self._loop.start()
        self._loop.post(self._dial)

    def write(self, grant: GrantId, copies: Sequence[Copy]) -> None:
        self._queue.put(grant, self._cut(copies))
        self._loop.post(self._work)

    def stop(self, grant: GrantId) -> bool:
        return self._queue.stop(grant)

    def close(self) -> None:
        self._queue.clear()
        self._loop.post(self._hang_up)
        self._loop.stop(0)

    def is_running(self) -> bool:
        return self._loop.is_running()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended; after `close` only."""
        return self._loop.stop(timeout_s)

    # --- the thread ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _dial(self) -> None:
        """Begin to connect."""

    @abstractmethod
    def _work(self) -> None:
        """There may be something in the queue."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Let go of whatever there is; comes as often as it likes."""

    def _fail(self, reason: str) -> None:
        self._hang_up()
        self._events.write_failed(self._session_nonce, reason)


AnyLink = TypeVar("AnyLink", bound=QueuedLink[Any])


class Links(Generic[AnyLink]):
    """Those of one writer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._links: list[AnyLink] = []

    def start(self, link: AnyLink) -> AnyLink:
        self._links = [other for other in self._links if other.is_running()]
        self._links.append(link)
        link.start()
        return link

    def close(self) -> bool:
        """Waits for the threads (bounded). Whether all have ended."""
        for link in self._links:
            link.close()
        num_stuck = sum(not link.join(_STOP_S) for link in self._links)
        if num_stuck:
            log.error("writers_stuck", extra=fields(transport=self._name, num_threads=num_stuck))
        return num_stuck == 0
