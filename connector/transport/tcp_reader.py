"""D's side of the tcp transport: bytes scattered by the kernel straight into the granted blocks.

One thread for all connections. It never waits inside a frame, so a P that stops in the middle of one holds up nobody,
and a stopped grant's blocks are free as soon as the call that writes into them has returned: the rest goes to scratch.
"""

import contextlib
import errno
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Endpoint, GrantId
from kvrelay.connector.sockets import join_address
from kvrelay.connector.transport import tcp
from kvrelay.connector.transport.base import ReaderEvents, Region
from kvrelay.connector.transport.pieces import MAX_VIEWS, PIECE_BYTES, advance, flat
from kvrelay.connector.transport.queue import InHand
from kvrelay.connector.transport.target import Target
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ConfigError, InvalidArgument, KvrelayError, Unauthenticated, Unavailable
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

_MAX_READS = 8  # calls before another connection has its turn
_MAX_HALF_OPEN = 256
_BACKLOG = 512
_RETRY_ACCEPT_S = 0.1
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False)
class _Connection:
    """One P's, or a stranger's until it has greeted."""

    stream: tcp.Stream
    opening: bytearray = field(default_factory=lambda: bytearray(tcp.GREETING_BYTES))
    header: bytearray = field(default_factory=lambda: bytearray(tcp.HEADER_BYTES))
    timer: Timer | None = None
    session_nonce: bytes | None = None  # set when P has greeted
    head: list[memoryview] = field(default_factory=list)  # what of the greeting, or of the next header, has not come
    body: list[memoryview] = field(default_factory=list)  # where what is missing of the current frame goes
    left: int = 0  # bytes of it
    grant: GrantId | None = None  # whose blocks `body` is in; None: scratch
    target: Target | None = None
    offset: int = 0
    size: int = 0


class TcpReader:
    """A bound socket, and a connection for each session."""

    one_sided = False

    def __init__(
        self,
        region: Region,
        clock: Clock,
        secret: str,
        bind: str,
        port: int,
        advertise: str,
        *,
        tls: tcp.DataTls | None = None,
    ) -> None:
        """Raises: ConfigError if the address cannot be bound, or for files that make no TLS."""
        self.num_dropped = 0
        self._pool = flat(region)
        self._block_bytes = region.shape[1]
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._secret = secret
        self._tls = None if tls is None else tls.server()
        self._socket = _listen(bind, port)
        address = join_address(advertise or bind, self._socket.getsockname()[1])
        self.endpoint = Endpoint(tcp.NAME, address if tls is None else tcp.TLS_SCHEME + address)
        self._events: ReaderEvents | None = None
        self._in_hand = InHand()  # its lock guards the next two as well
        self._targets: dict[tuple[bytes, bytes], tuple[GrantId, Target]] = {}  # by session's and grant's nonce
        self._sessions: dict[bytes, _Connection | None] = {}  # open ones; None: P has not connected yet
        self._half_open: OrderedDict[int, _Connection] = OrderedDict()  # by descriptor
        self._connections: dict[int, _Connection] = {}
        self._loop = Loop(f"kv-read-{tcp.NAME}", clock)

    def start(self, events: ReaderEvents) -> None:
        self._events = events
        self._loop.start()
        self._loop.post(self._watch_door)

    def begin_session(self, session_nonce: bytes) -> None:
        with self._in_hand.lock:
            self._sessions[session_nonce] = None

    def end_session(self, session_nonce: bytes) -> None:
        with self._in_hand.lock:
            connection = self._sessions.pop(session_nonce, None)
        if connection is not None:
            self._loop.post(lambda: self._drop(connection))

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        with self._in_hand.lock:
            self._targets[_name(grant)] = (grant, Target.of(block_ids, self._block_bytes, size))

    def stop(self, grant: GrantId) -> bool:
        with self._in_hand.lock:
            _, target = self._targets.pop(_name(grant), (None, None))
            if target is not None:
                target.is_live = False
            return self._in_hand.stop(grant)

    def close(self) -> None:
        if not self._loop.is_running():  # D could not start
            self._socket.close()
        self._loop.post(self._hang_up)
        if not self._loop.stop(tcp.STOP_S):
            log.error("reader_stuck", extra=fields(transport=tcp.NAME))

    # --- the door, on the thread -----------------------------------------------------------------------------------

    def _watch_door(self) -> None:
        self._loop.watch(self._socket.fileno(), zmq.POLLIN, self._admit)

    def _admit(self) -> None:
        try:
            sock, _address = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _OUT_OF_FILES:  # the door would go on ringing
                self._loop.unwatch(self._socket.fileno())
                self._loop.call_in(_RETRY_ACCEPT_S, self._watch_door)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._half_open) >= _MAX_HALF_OPEN:  # who means it has greeted long before it is the oldest
            self._refuse(next(iter(self._half_open.values())), "too many connections are being opened")
        try:
            stream: tcp.Stream = tcp.PlainStream(sock) if self._tls is None else tcp.TlsStream(sock, self._tls)
        except OSError:  # it has gone already
            sock.close()
            return
        connection = _Connection(stream)
        connection.head = [memoryview(connection.opening)]
        self._half_open[stream.sock.fileno()] = self._connections[stream.sock.fileno()] = connection
        connection.timer = self._loop.call_in(
            tcp.HANDSHAKE_S, lambda: self._refuse(connection, f"no greeting for {tcp.HANDSHAKE_S:g} s")
        )
        self._watch(connection, zmq.POLLIN, self._shake_hands)

    def _shake_hands(self, connection: _Connection) -> None:
        flags = connection.stream.handshake()
        self._watch(connection, flags or zmq.POLLIN, self._shake_hands if flags else self._hear_greeting)
        if not flags:
            self._hear_greeting(connection)

    def _hear_greeting(self, connection: _Connection) -> None:
        while connection.head:
            size = connection.stream.receive(connection.head)
            if not size:
                raise Unavailable("it left without a greeting")
            connection.head = advance(connection.head, size)
        session_nonce = tcp.check_greeting(self._secret, bytes(connection.opening))
        with self._in_hand.lock:
            if session_nonce not in self._sessions:
                raise Unauthenticated("it greeted for no open session")
            if self._sessions[session_nonce] is not None:
                raise Unauthenticated("it greeted for a session that has its connection")
            self._sessions[session_nonce] = connection
        connection.session_nonce = session_nonce
        connection.head = [memoryview(connection.header)]
        assert connection.timer is not None
        connection.timer.cancel()
        del self._half_open[connection.stream.sock.fileno()]
        said = connection.stream.send([memoryview(tcp.answer(self._secret, session_nonce))])
        assert said == tcp.ANSWER_BYTES, "the first bytes of a connection always find room"
        self._watch(connection, zmq.POLLIN, self._read)
        self._read(connection)

    # --- frames, on the thread -------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        for _ in range(_MAX_READS):
            self._read_some(connection)
        if connection.stream.has_more():
            self._loop.post(lambda: self._guard(connection, self._read))

    def _read_some(self, connection: _Connection) -> None:
        """One call: into what is missing of the frame, and into the header of the next if that may come as well."""
        with self._in_hand.lock:
            if connection.target is not None and not connection.target.is_live:
                connection.grant = connection.target = None
                connection.body = [self._scratch[: connection.left]]
            if connection.grant is not None:
                self._in_hand.begin(connection.grant)
        try:
            views = connection.body[:MAX_VIEWS]
            if len(views) == len(connection.body):
                views += connection.head
            size = connection.stream.receive(views)
        finally:
            self._leave(connection)
        if not size:
            raise Unavailable("P has ended it")
        of_body = min(size, connection.left)
        connection.left -= of_body
        connection.body = advance(connection.body, of_body)
        if connection.target is not None and not connection.left:
            self._finish(connection)
        connection.head = advance(connection.head, size - of_body)
        if not connection.head:
            self._begin(connection)

    def _leave(self, connection: _Connection) -> None:
        """The call that wrote into a grant's blocks has returned."""
        grant = connection.grant
        if grant is None:
            return
        with self._in_hand.lock:
            stopped = self._in_hand.end()
        if stopped:
            assert self._events is not None
            self._events.reader_idle(grant)

    def _begin(self, connection: _Connection) -> None:
        """A header has come: find where its bytes go."""
        assert connection.session_nonce is not None
        grant_nonce, connection.offset, connection.size = tcp.decode_header(bytes(connection.header))
        connection.left = connection.size
        connection.head = [memoryview(connection.header)]
        with self._in_hand.lock:
            grant, target = self._targets.get((connection.session_nonce, grant_nonce), (None, None))
        try:
            if target is None:
                raise InvalidArgument("grant", grant_nonce, "is not live")
            target.check(connection.offset, connection.size)
        except InvalidArgument as error:
            self.num_dropped += 1
            log.debug("piece_dropped", extra=fields(error=error.message))
            connection.grant = connection.target = None
            connection.body = [self._scratch[: connection.size]]
        else:
            connection.grant, connection.target = grant, target
            connection.body = target.views(self._pool, connection.offset, connection.size)

    def _finish(self, connection: _Connection) -> None:
        """The frame is in its blocks, unless they were given back meanwhile."""
        grant, target = connection.grant, connection.target
        connection.grant = connection.target = None
        assert grant is not None
        assert target is not None
        assert self._events is not None
        with self._in_hand.lock:
            if not target.is_live:
                return
            target.received.add(connection.offset, connection.offset + connection.size)
            if not target.is_complete:
                return
            target.is_live = False  # nothing may be written into landed blocks
            self._targets.pop(_name(grant), None)
        self._events.all_in(grant)

    # --- ends, on the thread ---------------------------------------------------------------------------------------

    def _watch(self, connection: _Connection, flags: int, step: "Callable[[_Connection], None]") -> None:
        self._loop.watch(connection.stream.sock.fileno(), flags, lambda: self._guard(connection, step))

    def _guard(self, connection: _Connection, step: "Callable[[_Connection], None]") -> None:
        if connection.stream.sock.fileno() < 0:
            return
        try:
            step(connection)
        except BlockingIOError:
            pass  # what is watched stays watched
        except (OSError, KvrelayError) as error:  # ssl.SSLError is an OSError
            self._refuse(connection, error.message if isinstance(error, KvrelayError) else str(error), error)

    def _refuse(self, connection: _Connection, reason: str, error: Exception | None = None) -> None:
        """End a connection for what came on it, or did not."""
        if isinstance(error, (InvalidArgument, Unauthenticated, ssl.SSLError)):
            self.num_dropped += 1
        log.debug("data_connection_ended", extra=fields(reason=reason))
        self._drop(connection)
        with self._in_hand.lock:
            is_open = connection.session_nonce in self._sessions
        if is_open:
            assert connection.session_nonce is not None
            assert self._events is not None
            self._events.read_failed(connection.session_nonce, f"the data connection ended: {reason}")

    def _drop(self, connection: _Connection) -> None:
        descriptor = connection.stream.sock.fileno()
        if descriptor < 0:
            return
        if connection.timer is not None:
            connection.timer.cancel()
        self._half_open.pop(descriptor, None)
        del self._connections[descriptor]
        self._loop.unwatch(descriptor)
        connection.stream.sock.close()

    def _hang_up(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        with contextlib.suppress(KeyError):  # it waits for descriptors
            self._loop.unwatch(self._socket.fileno())
        self._socket.close()


def _name(grant: GrantId) -> tuple[bytes, bytes]:
    return grant.session_nonce, grant.grant_nonce


def _listen(host: str, port: int) -> socket.socket:
    """Raises: ConfigError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}") from error
    return sock
