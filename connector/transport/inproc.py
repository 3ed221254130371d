"""KV bytes between two pools in one process: P's thread copies straight into D's blocks. One-sided, for tests.

D learns nothing but what P says, as with shared memory or RDMA. The hub stands for the machine: it knows the regions,
and when a writer is closed it tells D what a kernel would tell it of an exited process.
"""

import threading
from collections.abc import Sequence

from kvrelay.connector.messages import Endpoint, GrantId
from kvrelay.connector.transport.base import Copy, ReaderEvents, Region, WriterEvents
from kvrelay.connector.transport.link import QueuedLink
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

NAME = "inproc"
_STOP_S = 5.0


class InprocHub:
    """The readers of one process, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, InprocReader] = {}

    def attach(self, reader: "InprocReader") -> None:
        with self._lock:
            self._readers[reader.endpoint.address] = reader

    def detach(self, reader: "InprocReader") -> None:
        with self._lock:
            self._readers.pop(reader.endpoint.address, None)

    def find(self, address: str) -> "InprocReader | None":
        with self._lock:
            return self._readers.get(address)


class InprocReader:
    """D's side: a region, and nothing that moves."""

    one_sided = True

    def __init__(self, hub: InprocHub, name: str, region: Region) -> None:
        self.endpoint = Endpoint(NAME, name)
        self.region = region
        self.num_dropped = 0
        self._hub = hub
        self._events: ReaderEvents | None = None

    def start(self, events: ReaderEvents) -> None:
        self._events = events
        self._hub.attach(self)

    def begin_session(self, session_nonce: bytes) -> None:
        """Nothing to prepare: the address is all that P needs."""

    def end_session(self, session_nonce: bytes) -> None:
        """Nothing to end: D cannot stop P's writes, only learn that they have stopped."""

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        """Nothing to prepare: P names the blocks."""

    def stop(self, grant: GrantId) -> bool:
        return True

    def fence(self, session_nonce: bytes) -> None:
        """Called by P's writer when it is gone."""
        if self._events is not None:
            self._events.fenced(session_nonce)

    def close(self) -> None:
        self._hub.detach(self)


class InprocWriter:
    """P's side: one thread for each session."""

    name = NAME

    def __init__(self, hub: InprocHub, region: Region) -> None:
        self._hub = hub
        self._region = region
        self._links: list[InprocLink] = []

    def reaches(self, address: str) -> bool:
        return True

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "InprocLink":
        link = InprocLink(self._region, session_nonce, address, self._hub.find(address), events)
        self._links.append(link)
        link.start()
        return link

    def close(self) -> None:
        for link in self._links:
            link.close()
        for link in self._links:
            if not link.join(_STOP_S):
                log.error("writer_stuck", extra=fields(transport=NAME))
            else:
                link.fence()


class InprocLink(QueuedLink[Copy]):
    """The way from one P's region to one D's."""

    def __init__(
        self, region: Region, session_nonce: bytes, address: str, reader: InprocReader | None, events: WriterEvents
    ) -> None:
        super().__init__(NAME, MonotonicClock(), session_nonce, address, events, iter)
        self.reader = reader
        self._region = region

    def fence(self) -> None:
        """The thread has ended."""
        if self.reader is not None:
            self.reader.fence(self._session_nonce)

    def _dial(self) -> None:
        if self.reader is None:
            self._fail("nobody is at this address")

    def _hang_up(self) -> None:
        """There is no connection."""

    def _work(self) -> None:
        if self.reader is None:
            return
        while (work := self._queue.begin()) is not None:
            grant, copy = work
            copied = self._copy(copy)
            if self._queue.end():
                self._events.writer_idle(grant)
            elif copied:
                self._events.written(grant, copy.size)
            else:
                self._fail(f"block {copy.target_block} is not in D's pool")

    def _copy(self, copy: Copy) -> bool:
        assert self.reader is not None
        target = self.reader.region
        if copy.target_block >= target.shape[0]:
            return False
        part = slice(copy.start, copy.start + copy.size)
        target[copy.target_block, part] = self._region[copy.source_block, part]
        return True
