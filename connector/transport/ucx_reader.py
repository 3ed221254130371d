"""D's side of the ucx transport: a listener, and one UCX worker for each connection, all on one thread.

A connection has a worker of its own because that is what ends for certain: a fetch from a peer that was killed never
completes by itself, and with its worker its buffer is UCX's no more.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zmq

from kvrelay.connector import wire
from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Endpoint, GrantId
from kvrelay.connector.sockets import join_address
from kvrelay.connector.transport import ucp, ucp_library
from kvrelay.connector.transport.base import ReaderEvents, Region
from kvrelay.connector.transport.pieces import PIECE_BYTES, flat
from kvrelay.connector.transport.target import Target, Targets
from kvrelay.connector.transport.ucx import (
    GREET_S,
    GREETING,
    MAX_PIECES,
    NAME,
    format_address,
)
from kvrelay.engine.clock import Clock
from kvrelay.engine.config import is_loopback
from kvrelay.engine.errors import ConfigError, InvalidArgument, Unavailable
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

_MAX_STRANGERS = 32  # connections that have not said whose they are
_STOP_S = 5.0


@dataclass(slots=True, eq=False)
class _Connection:
    """One P's, or a stranger's. The thread's own, but for the nonce."""

    worker: ucp.Worker | None = None
    session_nonce: bytes = b""
    failure: str = ""
    timer: Timer | None = None
    num_buffers: int = 0
    free: deque[Region] = field(default_factory=deque)  # buffers that UCX is done with

    def buffer(self) -> Region:
        """Raises: InvalidArgument if more pieces come at once than the other side may send."""
        if self.free:
            return self.free.pop()
        if self.num_buffers == MAX_PIECES:
            raise InvalidArgument("pieces", self.num_buffers + 1, f"at most {MAX_PIECES} at once")
        self.num_buffers += 1
        return np.empty(PIECE_BYTES, np.uint8)


class UcxReader:
    """D's side.

    Raises: ConfigError if there is no UCX here, the address cannot be bound, or it is not to be trusted.
    """

    one_sided = False

    def __init__(
        self, region: Region, clock: Clock, bind: str, port: int, advertise: str, *, insecure: bool = False
    ) -> None:
        if not is_loopback(bind) and not insecure:
            raise ConfigError(f"kv_transport = ucx: beyond loopback ({bind}) only with --insecure: it has no secrets")
        self.num_dropped = 0
        self._pool = flat(region)
        self._library = library = ucp_library.Library()
        try:
            self._context = ucp.Context(library, is_local=is_loopback(bind))
        except Unavailable as error:
            raise ConfigError(error.message) from error
        try:
            self._listener = ucp.Worker(self._context, _ignore, _ignore_error)
        except Unavailable as error:
            self._context.close()
            raise ConfigError(error.message) from error
        try:
            bound_port = self._listener.listen(bind, port, self._on_connect)
        except Unavailable as error:
            self._listener.close()
            self._context.close()
            raise ConfigError(f"cannot listen on {join_address(bind, port)} with UCX: {error.message}") from error
        address = join_address(advertise or bind, bound_port)
        self.endpoint = Endpoint(NAME, format_address(address, rdma=ucp_library.has_rdma()))
        self._events: ReaderEvents | None = None
        self._targets = Targets(region.shape[1])  # their lock guards the next as well
        self._sessions: dict[bytes, _Connection | None] = {}  # the open ones, by nonce
        self._connections: list[_Connection] = []
        self._loop = Loop(f"kv-read-{NAME}", clock)
        self._is_closed = False

    def start(self, events: ReaderEvents) -> None:
        self._events = events
        self._loop.start()
        self._loop.post(self._listen)

    def begin_session(self, session_nonce: bytes) -> None:
        with self._targets.lock:
            self._sessions[session_nonce] = None

    def end_session(self, session_nonce: bytes) -> None:
        with self._targets.lock:
            connection = self._sessions.pop(session_nonce, None)
        if connection is not None:
            self._loop.post(partial(self._hang_up, connection))

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        self._targets.accept(grant, block_ids, size)

    def stop(self, grant: GrantId) -> bool:
        return self._targets.stop(grant)

    def close(self) -> None:
        if not self._loop.is_running():  # D could not start
            self._end()
        self._loop.post(self._end)
        if not self._loop.stop(_STOP_S):
            log.error("reader_stuck", extra=fields(transport=NAME))

    # --- connections, on the thread --------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), zmq.POLLIN, self._drive_listener)
        self._drive_listener()

    def _drive_listener(self) -> None:
        if not self._is_closed and not self._listener.progress():
            self._loop.post(self._drive_listener)

    def _on_connect(self, request: int) -> None:
        """UCX is calling."""
        if sum(not connection.session_nonce for connection in self._connections) >= _MAX_STRANGERS:
            self.num_dropped += 1
            self._listener.reject(request)
            return
        ucp.sweep(self._library)
        connection = _Connection()
        try:
            connection.worker = ucp.Worker(
                self._context, partial(self._on_message, connection), partial(self._lose, connection)
            )
        except Unavailable as error:
            log.error("connection_refused", extra=fields(transport=NAME, error=error.message))
            self._listener.reject(request)
            return
        self._connections.append(connection)
        self._loop.watch(connection.worker.fileno(), zmq.POLLIN, partial(self._drive, connection))
        connection.timer = self._loop.call_in(GREET_S, partial(self._hang_up, connection))
        try:
            connection.worker.accept(request)
        except Unavailable as error:
            self._lose(connection, error.message)
        self._loop.post(partial(self._drive, connection))

    def _lose(self, connection: _Connection, reason: str) -> None:
        """UCX may be calling: the worker is closed when it has returned."""
        connection.failure = connection.failure or reason

    def _drive(self, connection: _Connection) -> None:
        if connection.worker is None:
            return
        is_idle = connection.worker.progress()
        if connection.failure:
            self._fail(connection)
        elif not is_idle:
            self._loop.post(partial(self._drive, connection))

    def _fail(self, connection: _Connection) -> None:
        assert self._events is not None
        self._hang_up(connection)
        if connection.session_nonce:
            with self._targets.lock:
                is_open = connection.session_nonce in self._sessions
            if is_open:
                reason = f"the data connection ended: {connection.failure}"
                self._events.read_failed(connection.session_nonce, reason)

    def _hang_up(self, connection: _Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.worker is not None:
            self._loop.unwatch(connection.worker.fileno())
            worker, connection.worker = connection.worker, None
            self._connections.remove(connection)
            worker.close()

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for connection in list(self._connections):
            self._hang_up(connection)
        if self._loop.is_own_thread():
            self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._context.close()

    # --- messages: UCX is calling ------------------------------------------------------------------------------------

    def _on_message(self, connection: _Connection, header: bytes, data: int, size: int, is_announced: bool) -> None:
        if connection.failure:
            return
        try:
            if not connection.session_nonce:
                self._greet(connection, header)
                return
            grant, offset = self._check(connection, header, size)
            if is_announced:
                self._fetch(connection, grant, offset, data, size)
            else:
                self._take(grant, offset, _bytes_at(data, size))
        except InvalidArgument as error:
            self.num_dropped += 1
            log.debug("piece_dropped", extra=fields(error=error.message))

    def _greet(self, connection: _Connection, header: bytes) -> None:
        nonce = header.removeprefix(GREETING)
        with self._targets.lock:
            is_expected = header.startswith(GREETING) and self._sessions.get(nonce, connection) is None
            if is_expected:
                self._sessions[nonce] = connection
                connection.session_nonce = nonce
        if not is_expected:
            self._lose(connection, "it is nobody's")
            raise InvalidArgument("session_nonce", nonce, "is not that of an open session without a connection")
        if connection.timer is not None:
            connection.timer.cancel()

    def _check(self, connection: _Connection, header: bytes, size: int) -> tuple[GrantId, int]:
        grant, offset, said = wire.decode_header(header)
        if grant.session_nonce != connection.session_nonce:
            raise InvalidArgument("session_nonce", grant.session_nonce, "is not this connection's")
        if size != said:
            raise InvalidArgument("size", said, f"the piece has {size} bytes")
        self._targets.check(grant, offset, size)
        return grant, offset

    def _fetch(self, connection: _Connection, grant: GrantId, offset: int, data: int, size: int) -> None:
        assert connection.worker is not None
        try:
            buffer = connection.buffer()
        except InvalidArgument as error:
            self._lose(connection, error.message)
            raise
        fetched = partial(self._fetched, connection, grant, offset, size, buffer)
        connection.worker.fetch(data, buffer.ctypes.data, size, fetched)

    def _fetched(
        self, connection: _Connection, grant: GrantId, offset: int, size: int, buffer: Region, ok: bool
    ) -> None:
        if ok:
            try:
                self._take(grant, offset, memoryview(buffer)[:size])
            except InvalidArgument:  # stopped meanwhile
                self.num_dropped += 1
        else:
            self._lose(connection, "a piece could not be fetched")
        connection.free.append(buffer)

    def _take(self, grant: GrantId, offset: int, data: memoryview) -> None:
        """Raises: InvalidArgument if the grant is not live any more."""
        assert self._events is not None
        self._targets.take(grant, offset, data, self._scatter, self._events)

    def _scatter(self, target: Target, offset: int, data: memoryview) -> None:
        target.scatter(self._pool, offset, data)


def _bytes_at(address: int, size: int) -> memoryview:
    """A message's bytes where UCX has them. Raises: InvalidArgument for none."""
    if not size:
        raise InvalidArgument("size", size, "must not be 0")
    return memoryview(ucp.bytes_at(address, size)).cast("B")


def _ignore(header: bytes, data: int, size: int, is_announced: bool) -> None:
    """Nobody is connected to the listener's own worker."""


def _ignore_error(reason: str) -> None:
    """Nobody is connected to the listener's own worker."""
