"""P's side of the ucx transport: one UCX worker and one thread for each session."""

from collections import deque
from functools import partial

import numpy as np
import zmq

from kvrelay.connector import wire
from kvrelay.connector.loop import Timer
from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport import ucp, ucp_library
from kvrelay.connector.transport.base import Region, WriterEvents
from kvrelay.connector.transport.link import Links, QueuedLink
from kvrelay.connector.transport.pieces import PIECE_BYTES, Piece, cutter
from kvrelay.connector.transport.ucx import (
    GREET_S,
    GREETING,
    MAX_PIECES,
    NAME,
    parse_address,
)
from kvrelay.engine.clock import Clock
from kvrelay.engine.config import is_loopback
from kvrelay.engine.errors import Unavailable


class UcxWriter:
    """P's side. `rdma_only`: D's are reached only where both have RDMA; `insecure`: beyond loopback too.

    Raises: ConfigError if there is no UCX here.
    """

    name = NAME

    def __init__(self, region: Region, clock: Clock, *, rdma_only: bool = False, insecure: bool = False) -> None:
        self._region = region
        self._clock = clock
        self._rdma_only = rdma_only
        self._insecure = insecure
        self._library = ucp_library.Library()
        self._links: Links[UcxLink] = Links(NAME)

    def reaches(self, address: str) -> bool:
        try:
            host, _port, rdma = parse_address(address)
        except ValueError:
            return False
        if not self._insecure and not is_loopback(host):
            return False
        return not self._rdma_only or (rdma and ucp_library.has_rdma())

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "UcxLink":
        ucp.sweep(self._library)
        return self._links.start(UcxLink(self._region, self._clock, self._library, session_nonce, address, events))

    def close(self) -> None:
        self._links.close()
        ucp.sweep(self._library)


class UcxLink(QueuedLink[Piece]):
    """One data connection to a D."""

    def __init__(
        self,
        region: Region,
        clock: Clock,
        library: ucp_library.Library,
        session_nonce: bytes,
        address: str,
        events: WriterEvents,
    ) -> None:
        super().__init__(NAME, clock, session_nonce, address, events, cutter(region))
        self._library = library
        self._context: ucp.Context | None = None
        self._worker: ucp.Worker | None = None
        self._is_greeted = False
        self._failure = ""
        self._is_over = False
        self._timer: Timer | None = None
        self._free: deque[Region] = deque()  # buffers that UCX is done with
        self._num_buffers = 0

    # --- the thread ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        try:
            host, port, _rdma = parse_address(self._address)
            self._context = ucp.Context(self._library, is_local=is_loopback(host))
            self._worker = ucp.Worker(self._context, _ignore, self._lose)
            self._loop.watch(self._worker.fileno(), zmq.POLLIN, self._work)
            self._worker.connect(host, port)
        except (Unavailable, ValueError) as error:
            self._fail(str(error))
            return
        self._timer = self._loop.call_in(GREET_S, self._expired)
        self._worker.send(GREETING + self._session_nonce, 0, 0, self._greeted)
        self._work()

    def _greeted(self, ok: bool) -> None:
        """D has the nonce, or will have it before any piece."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_greeted = ok
        if not ok:
            self._lose("it cannot be reached")

    def _expired(self) -> None:
        self._fail(f"no connection in {GREET_S:g} s")

    def _lose(self, reason: str) -> None:
        """UCX is calling: the worker is closed when it has returned."""
        self._failure = self._failure or reason

    def _work(self) -> None:
        """Let UCX and the queue go on as far as they can without waiting."""
        if self._worker is None:
            return
        is_idle = self._worker.progress()
        while not self._failure and self._write_piece():
            is_idle = False
        if self._failure:
            self._fail(f"the data connection ended: {self._failure}")
        elif not is_idle:
            self._loop.post(self._work)

    def _write_piece(self) -> bool:
        """Whether there was one, and room for it."""
        assert self._worker is not None
        if not self._is_greeted or not (self._free or self._num_buffers < MAX_PIECES):
            return False
        work = self._queue.begin()
        if work is None:
            return False
        grant, piece = work
        buffer = self._buffer()
        self._pack(piece, buffer)
        if self._queue.end():
            self._free.append(buffer)
            self._events.writer_idle(grant)
        else:
            header = wire.encode_header(grant, piece.offset, piece.size)
            self._worker.send(header, buffer.ctypes.data, piece.size, partial(self._sent, grant, piece.size, buffer))
        return True

    def _buffer(self) -> Region:
        if self._free:
            return self._free.pop()  # the one used last: it is still in the cache
        self._num_buffers += 1
        return np.empty(PIECE_BYTES, np.uint8)

    def _pack(self, piece: Piece, buffer: Region) -> None:
        at, target = 0, memoryview(buffer)
        for view in piece.views:
            target[at : at + len(view)] = view
            at += len(view)

    def _sent(self, grant: GrantId, size: int, buffer: Region, ok: bool) -> None:
        """D has fetched the piece, or UCX has a copy of it.

        Not before may COMMIT be said: a D that was frozen may fetch late, and from a buffer with another piece.
        """
        self._free.append(buffer)
        if ok:
            self._events.written(grant, size)
        else:
            self._lose("a piece could not be sent")

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            super()._fail(reason)

    def _hang_up(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._loop.unwatch(self._worker.fileno())
            worker, self._worker = self._worker, None
            worker.close()
        if self._context is not None:
            self._context.close()
            self._context = None


def _ignore(header: bytes, data: int, size: int, is_announced: bool) -> None:
    """D has nothing to say on this connection."""
