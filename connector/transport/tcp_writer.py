"""P's side of the tcp transport: pieces gathered by the kernel straight from the pool, nothing copied before.

A piece that is stopped half-way must still be ended, or the next could not be told from it: the rest of it is sent from
a scratch buffer. So a stop needs no word from the peer, which may be frozen, and cuts no other transfer.
"""

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable

import zmq

from kvrelay.connector.loop import Timer
from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport import tcp
from kvrelay.connector.transport.base import Region, WriterEvents
from kvrelay.connector.transport.link import Links, QueuedLink
from kvrelay.connector.transport.pieces import PIECE_BYTES, Piece, advance, cutter
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import KvrelayError, Unavailable

_MAX_SENDS = 16  # calls before the end of the connection is looked for
_SAME_HOST_CONGESTION = b"cubic"  # a host whose default is bbr paces its own loopback: 3.2 GB/s instead of 5.5
_SCRATCH = memoryview(bytes(PIECE_BYTES))


class TcpWriter:
    """One connection and one thread for each session."""

    name = tcp.NAME

    def __init__(
        self, region: Region, clock: Clock, secret: str, *, insecure: bool = False, tls: tcp.DataTls | None = None
    ) -> None:
        """Raises: ConfigError for files that make no TLS."""
        self._region = region
        self._clock = clock
        self._secret = secret
        self._insecure = insecure
        self._tls = None if tls is None else tls.client()
        self._links: Links[TcpLink] = Links(tcp.NAME)

    def reaches(self, address: str) -> bool:
        try:
            is_tls, host, _port = tcp.split_address(address)
        except ValueError:
            return False
        return self._tls is not None if is_tls else tcp.is_trusted(host, insecure=self._insecure)

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "TcpLink":
        link = TcpLink(self._region, self._clock, self._secret, self._tls, session_nonce, address, events)
        return self._links.start(link)

    def close(self) -> None:
        self._links.close()


class TcpLink(QueuedLink[Piece]):
    """One data connection to a D."""

    def __init__(
        self,
        region: Region,
        clock: Clock,
        secret: str,
        tls: ssl.SSLContext | None,
        session_nonce: bytes,
        address: str,
        events: WriterEvents,
    ) -> None:
        super().__init__(tcp.NAME, clock, session_nonce, address, events, cutter(region))
        self._secret = secret
        self._tls = tls
        self._stream: tcp.Stream | None = None
        self._timer: Timer | None = None
        self._is_open = False  # D has answered
        self._answer = bytearray(tcp.ANSWER_BYTES)
        self._unheard = [memoryview(self._answer)]
        self._grant: GrantId | None = None  # of the frame that is being sent; None: nobody's blocks are in it
        self._size = 0
        self._views: list[memoryview] = []  # what of that frame is not sent yet

    def stop(self, grant: GrantId) -> bool:
        if super().stop(grant):
            return True
        self._loop.post(self._work)  # the thread may wait for room that never comes
        return False

    # --- opening, on the thread --------------------------------------------------------------------------------------

    def _dial(self) -> None:
        try:
            self._is_tls, self._host, port = tcp.split_address(self._address)
            family, kind, protocol, _, where = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except (OSError, ValueError) as error:
            self._fail(f"{self._address}: {error}")
            return
        self._stream = tcp.PlainStream(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error_number = sock.connect_ex(where)
        if error_number not in (0, errno.EINPROGRESS):
            self._fail(f"{self._address}: {os.strerror(error_number)}")
            return
        self._timer = self._loop.call_in(
            tcp.HANDSHAKE_S, lambda: self._fail(f"{self._address}: no answer for {tcp.HANDSHAKE_S:g} s")
        )
        self._loop.watch(sock.fileno(), zmq.POLLOUT, lambda: self._or_fail(self._connected))

    def _connected(self) -> None:
        assert self._stream is not None
        sock = self._stream.sock
        if error_number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error_number, os.strerror(error_number))
        if sock.getsockname()[0] == sock.getpeername()[0]:
            with contextlib.suppress(OSError):  # a kernel that has no other than its default
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _SAME_HOST_CONGESTION)
        if self._is_tls:
            assert self._tls is not None, "reaches() has said no"
            self._stream = tcp.TlsStream(sock, self._tls, server_hostname=self._host)
        self._shake_hands()

    def _shake_hands(self) -> None:
        assert self._stream is not None
        if flags := self._stream.handshake():
            self._loop.watch(self._stream.sock.fileno(), flags, lambda: self._or_fail(self._shake_hands))
            return
        said = self._stream.send([memoryview(tcp.greeting(self._secret, self._session_nonce))])
        assert said == tcp.GREETING_BYTES, "the first bytes of a connection always find room"
        self._loop.watch(self._stream.sock.fileno(), zmq.POLLIN, lambda: self._or_fail(self._hear_answer))

    def _hear_answer(self) -> None:
        assert self._stream is not None
        while self._unheard:
            size = self._stream.receive(self._unheard)
            if not size:
                raise Unavailable("the decode node did not take the data connection")
            self._unheard = advance(self._unheard, size)
        tcp.check_answer(self._secret, self._session_nonce, bytes(self._answer))
        assert self._timer is not None
        self._timer.cancel()
        self._is_open = True
        self._work()

    # --- writing, on the thread --------------------------------------------------------------------------------------

    def _ready(self) -> None:
        """There is room, or D has ended the connection, or TLS has a word of its own to say."""
        assert self._stream is not None
        with contextlib.suppress(BlockingIOError):
            size = self._stream.receive([memoryview(bytearray(1))])
            raise Unavailable("D said something on it" if size else "D has ended it")
        self._work()

    def _work(self) -> None:
        if self._is_open:
            self._or_fail(self._write_frames)

    def _write_frames(self) -> None:
        assert self._stream is not None
        flags = zmq.POLLIN | zmq.POLLOUT
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_SENDS):
                if not self._views and not self._begin():
                    flags = zmq.POLLIN
                    break
                self._leave_if_stopped()
                if self._views:
                    self._views = advance(self._views, self._stream.send(self._views))
                if not self._views:
                    self._end()
        self._loop.watch(self._stream.sock.fileno(), flags, lambda: self._or_fail(self._ready))

    def _begin(self) -> bool:
        """Whether there was a piece."""
        work = self._queue.begin()
        if work is None:
            return False
        self._grant, piece = work
        self._size = piece.size
        header = tcp.encode_header(self._grant.grant_nonce, piece.offset, piece.size)
        self._views = [memoryview(header), *piece.views]
        return True

    def _leave_if_stopped(self) -> None:
        """The pool is not read from here on: the rest of the frame only keeps its length."""
        if self._grant is None or not self._queue.is_stopped():
            return
        num_left = sum(map(len, self._views))
        of_header = max(0, num_left - self._size)
        if of_header == tcp.HEADER_BYTES:  # D knows nothing of it yet
            self._views = []
        else:
            self._views = [*self._views[: of_header > 0], _SCRATCH[: num_left - of_header]]
        self._end()

    def _end(self) -> None:
        """The piece in hand needs its blocks no more."""
        if self._grant is None:
            return
        grant, self._grant = self._grant, None
        if self._queue.end():
            self._events.writer_idle(grant)
        else:
            self._events.written(grant, self._size)

    # --- ends, on the thread -----------------------------------------------------------------------------------------

    def _or_fail(self, step: Callable[[], None]) -> None:
        if self._stream is None:
            return
        try:
            step()
        except BlockingIOError:
            pass  # what is watched stays watched
        except (OSError, KvrelayError) as error:  # ssl.SSLError is an OSError
            self._fail(f"{self._address}: {error.message if isinstance(error, KvrelayError) else error}")

    def _fail(self, reason: str) -> None:
        super()._fail(f"the data connection ended: {reason}")

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            with contextlib.suppress(KeyError):
                self._loop.unwatch(self._stream.sock.fileno())
            self._stream.sock.close()
            self._stream = None
        self._is_open = False
        self._views = []
        if self._grant is not None:
            grant, self._grant = self._grant, None
            if self._queue.end():
                self._events.writer_idle(grant)
