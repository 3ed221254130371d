"""KV bytes over ZMQ: each piece is a header and at most 1 MiB, packed from the granted blocks, received into them.

Two-sided: D's reader thread checks each piece's session, grant and bounds before it touches a block, and counts each
byte of a grant once, however often it comes. P packs by copying, so a block is P's again as soon as it is packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvrelay.connector import curve, wire
from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import Endpoint, GrantId
from kvrelay.connector.sockets import Monitored, Prober, Sent, dealer, join_address, listen, send_to
from kvrelay.connector.transport.base import ReaderEvents, Region, WriterEvents
from kvrelay.connector.transport.link import Links, QueuedLink
from kvrelay.connector.transport.pieces import PIECE_BYTES, Piece, cutter, flat
from kvrelay.connector.transport.target import Target, Targets
from kvrelay.connector.transport.zmq_memory import keep_freed_memory
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ConfigError, InvalidArgument, KvrelayError
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

NAME = "zmq"
_MAX_QUEUED = 4  # pieces, at each end of a connection
_MAX_WRITES = 16  # pieces written before a monitor has its turn
_MAX_READS = 16  # pieces handled before a monitor has its turn
_STOP_S = 5.0


# --- P ------------------------------------------------------------------------------------------------------------


class ZmqWriter:
    """P's side: one connection and one thread for each session."""

    name = NAME

    def __init__(self, region: Region, clock: Clock, secret: str = "") -> None:
        """`secret`: the cluster's, for CURVE where it is spoken."""
        keep_freed_memory()
        self._region = region
        self._secret = secret
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: Links[ZmqLink] = Links(NAME)

    def reaches(self, address: str) -> bool:
        return True

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "ZmqLink":
        link = ZmqLink(self._region, self._clock, self._secret, self._context, session_nonce, address, events)
        return self._links.start(link)

    def close(self) -> None:
        if self._links.close():
            self._context.term()


class ZmqLink(QueuedLink[Piece]):
    """One data connection to a D."""

    def __init__(
        self,
        region: Region,
        clock: Clock,
        secret: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        session_nonce: bytes,
        address: str,
        events: WriterEvents,
    ) -> None:
        super().__init__(NAME, clock, session_nonce, address, events, cutter(region))
        self._secret = secret
        self._context = context
        self._connection: Monitored | None = None
        self._is_greeted = False

    # --- the thread ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        socket = dealer(
            self._context,
            max_queued=_MAX_QUEUED,
            max_bytes=wire.MAX_HEADER_BYTES,
            routing_id=_routing_id(self._session_nonce),
        )
        self._connection = Monitored(self._loop, socket, lambda: self._fail("the data connection ended"))
        try:
            address = curve.prepare(socket, self._secret, self._address)
        except KvrelayError as error:
            self._fail(error.message)
            return
        self._connection.watch(zmq.POLLOUT, self._greet)
        if wrong := self._connection.connect(address):
            self._fail(wrong)

    def _greet(self) -> None:
        """The first message only tells D that the connection is there; its routing id says which session's."""
        self._is_greeted = True
        self._send([b""])
        self._work()

    def _work(self) -> None:
        """Wait for room while there is something to write, and for D's probes always."""
        if self._connection is not None and self._is_greeted:
            self._connection.watch(zmq.POLLIN | (zmq.POLLOUT if self._queue else 0), self._ready)

    def _ready(self) -> None:
        for _ in range(_MAX_WRITES):
            if self._connection is None:
                return
            events = self._connection.socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN:
                self._connection.socket.recv_multipart(zmq.NOBLOCK)  # a probe; it says nothing
            if not events & zmq.POLLOUT:
                return
            if not self._write_piece():
                self._work()
                return

    def _write_piece(self) -> bool:
        """Whether there was one."""
        work = self._queue.begin()
        if work is None:
            return False
        grant, piece = work
        payload = self._pack(piece)
        if self._queue.end():
            self._events.writer_idle(grant)
        elif self._send([wire.encode_header(grant, piece.offset, piece.size), payload]):
            self._events.written(grant, piece.size)
        return True

    def _pack(self, piece: Piece) -> bytes:
        """One call for all of its blocks."""
        return b"".join(piece.views)

    def _send(self, frames: list[bytes]) -> bool:
        """ZMQ takes its own copy of the frames: measured as fast as lending it them, and nothing to wait for."""
        assert self._connection is not None
        try:
            self._connection.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._fail(f"cannot send: {error}")
            return False
        return True

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# --- D ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Connection:
    """The data connection that an open session may have."""

    session_nonce: bytes
    is_up: bool = False  # P has greeted on it


class ZmqReader:
    """D's side: one bound socket and one thread for all sessions."""

    one_sided = False

    def __init__(self, region: Region, clock: Clock, bind: str, port: int, advertise: str, secret: str = "") -> None:
        """`secret`: the cluster's, for CURVE beyond loopback."""
        keep_freed_memory()
        is_curve = curve.is_due(secret, bind, advertise or bind)
        self.num_dropped = 0
        self._pool = flat(region)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket, bound_port = listen(
                self._context,
                bind,
                port,
                max_queued=_MAX_QUEUED,
                max_bytes=PIECE_BYTES,
                curve_secret=secret if is_curve else "",
            )
        except ConfigError:
            self._context.term()
            raise
        address = join_address(advertise or bind, bound_port)
        self.endpoint = Endpoint(NAME, curve.SCHEME + address if is_curve else address)
        self._events: ReaderEvents | None = None
        self._targets = Targets(region.shape[1])  # their lock guards the next as well
        self._connections: dict[bytes, _Connection] = {}  # by routing id
        self._monitored: Monitored | None = None
        self._loop = Loop(f"kv-read-{NAME}", clock)
        self._prober = Prober(self._loop, self._probe)

    def start(self, events: ReaderEvents) -> None:
        self._events = events
        self._loop.start()
        self._loop.post(self._listen)

    def begin_session(self, session_nonce: bytes) -> None:
        with self._targets.lock:
            self._connections[_routing_id(session_nonce)] = _Connection(session_nonce)

    def end_session(self, session_nonce: bytes) -> None:
        with self._targets.lock:
            self._connections.pop(_routing_id(session_nonce), None)

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        self._targets.accept(grant, block_ids, size)

    def stop(self, grant: GrantId) -> bool:
        return self._targets.stop(grant)

    def close(self) -> None:
        if not self._loop.is_running():  # D could not start
            self._socket.close()
        self._loop.post(self._hang_up)
        if self._loop.stop(_STOP_S):
            self._context.term()
        else:
            log.error("reader_stuck", extra=fields(transport=NAME))

    # --- the thread ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._monitored = Monitored(self._loop, self._socket, self._prober.start)
        self._monitored.watch(zmq.POLLIN, self._read)

    def _hang_up(self) -> None:
        self._prober.stop()
        if self._monitored is not None:
            self._monitored.close()

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return
            try:
                self._take(frames[0].bytes, frames[1:])
            except InvalidArgument as error:
                self.num_dropped += 1
                log.debug("piece_dropped", extra=fields(error=error.message))

    def _take(self, routing_id: bytes, frames: "list[zmq.Frame]") -> None:
        if len(frames) == 1 and not frames[0].bytes:
            self._greeted(routing_id)
            return
        if len(frames) != 2:
            raise InvalidArgument("frames", len(frames), "must be 2")
        grant, offset, size = wire.decode_header(frames[0].bytes)
        if routing_id != _routing_id(grant.session_nonce):
            raise InvalidArgument("session_nonce", grant.session_nonce, "is not this connection's")
        data = memoryview(frames[1].buffer)
        if len(data) != size:
            raise InvalidArgument("size", size, f"the piece has {len(data)} bytes")
        assert self._events is not None
        self._targets.take(grant, offset, data, self._scatter, self._events)

    def _greeted(self, routing_id: bytes) -> None:
        with self._targets.lock:
            connection = self._connections.get(routing_id)
            if connection is not None:
                connection.is_up = True

    def _scatter(self, target: Target, offset: int, data: memoryview) -> None:
        target.scatter(self._pool, offset, data)

    def _probe(self) -> None:
        """Some connection has ended: find out which, after what came before the end."""
        assert self._events is not None
        self._read()
        with self._targets.lock:
            up = [(routing_id, c) for routing_id, c in self._connections.items() if c.is_up]
        for routing_id, connection in up:
            if send_to(self._socket, routing_id, b"") is Sent.GONE:
                connection.is_up = False
                self._events.read_failed(connection.session_nonce, "the data connection ended")


def _routing_id(session_nonce: bytes) -> bytes:
    return b"kv" + session_nonce
