"""What both ends of the tcp transport say to each other, over a plain socket or TLS.

P greets with the session's name and a proof of it by the cluster secret, D answers with its own; a session's greeting
is good once. Then come frames from P alone: a header, and the bytes it tells of. Nothing here waits.
"""

import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from kvrelay.connector.transport.pieces import MAX_VIEWS, PIECE_BYTES
from kvrelay.connector.wire import PROOF_BYTES, SESSION_NONCE_BYTES
from kvrelay.engine.config import is_loopback
from kvrelay.engine.errors import ConfigError, InvalidArgument, Unauthenticated
from kvrelay.engine.secret import NONCE_BYTES, prove, verify

NAME = "tcp"
HANDSHAKE_S = 5.0
STOP_S = 5.0
TLS_SCHEME = "tls://"
_MAGIC = b"kvr1"
_GREETING = struct.Struct(f"!4s{SESSION_NONCE_BYTES}s{PROOF_BYTES}s")
_ANSWER = struct.Struct(f"!4s{PROOF_BYTES}s")
_HEADER = struct.Struct(f"!{NONCE_BYTES}sQI")
GREETING_BYTES = _GREETING.size
ANSWER_BYTES = _ANSWER.size
HEADER_BYTES = _HEADER.size
_P, _D = "prefill data", "decode data"


# --- what is said -------------------------------------------------------------------------------------------------


def greeting(secret: str, session_nonce: bytes) -> bytes:
    """P's first word."""
    return _GREETING.pack(_MAGIC, session_nonce, prove(secret, _P, session_nonce))


def check_greeting(secret: str, said: bytes) -> bytes:
    """The session that P names. Raises: InvalidArgument, Unauthenticated."""
    magic, session_nonce, proof = _GREETING.unpack(said)
    if magic != _MAGIC:
        raise InvalidArgument("greeting", said[:4], "not this protocol's")
    if not verify(secret, proof, _P, session_nonce):
        raise Unauthenticated("the prefill node's data connection did not prove the cluster secret")
    assert isinstance(session_nonce, bytes)
    return session_nonce


def answer(secret: str, session_nonce: bytes) -> bytes:
    """D's only word."""
    return _ANSWER.pack(_MAGIC, prove(secret, _D, session_nonce))


def check_answer(secret: str, session_nonce: bytes, said: bytes) -> None:
    """Raises: InvalidArgument, Unauthenticated."""
    magic, proof = _ANSWER.unpack(said)
    if magic != _MAGIC:
        raise InvalidArgument("answer", said[:4], "not this protocol's")
    if not verify(secret, proof, _D, session_nonce):
        raise Unauthenticated("the decode node's data connection did not prove the cluster secret")


def encode_header(grant_nonce: bytes, offset: int, size: int) -> bytes:
    """`size` bytes follow, for `offset` of the grant's run of bytes."""
    return _HEADER.pack(grant_nonce, offset, size)


def decode_header(said: bytes) -> tuple[bytes, int, int]:
    """(grant nonce, offset, size).

    Raises: InvalidArgument for a size that no piece has: where the next header begins is not known then.
    """
    grant_nonce, offset, size = _HEADER.unpack(said)
    if not 0 < size <= PIECE_BYTES:
        raise InvalidArgument("size", size, f"must be in [1, {PIECE_BYTES}]")
    return grant_nonce, offset, size


# --- how it travels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTls:
    """PEM files of the data path's TLS. Each end shows its certificate and checks the other's."""

    certificate: str
    key: str
    ca: str

    @classmethod
    def of(cls, certificate: str, key: str, ca: str) -> "DataTls | None":
        """Of flags that name all three files, or none."""
        return cls(certificate=certificate, key=key, ca=ca) if certificate else None

    def server(self) -> ssl.SSLContext:
        """Raises: ConfigError."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """Raises: ConfigError. The name that P dials must be in D's certificate."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"data_tls: {error}: {self.certificate}, {self.key}, {self.ca}") from error
        return context


class Stream(Protocol):
    """A connection that never waits: BlockingIOError says that it would."""

    @property
    def sock(self) -> socket.socket: ...

    def handshake(self) -> int:
        """What to wait for before the next call (zmq.POLLIN, zmq.POLLOUT); 0: done."""

    def send(self, views: list[memoryview]) -> int: ...

    def receive(self, views: list[memoryview]) -> int:
        """0: the peer has ended it."""

    def has_more(self) -> bool:
        """Whether bytes have come that the socket no longer shows."""


class PlainStream:
    """Gathers and scatters in the kernel."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def handshake(self) -> int:
        return 0

    def send(self, views: list[memoryview]) -> int:
        return self.sock.sendmsg(views[: MAX_VIEWS + 1])

    def receive(self, views: list[memoryview]) -> int:
        return self.sock.recvmsg_into(views[: MAX_VIEWS + 1])[0]

    def has_more(self) -> bool:
        return False


class TlsStream:
    """One view a call: OpenSSL neither gathers nor scatters, and a record holds 16 KiB at most."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        self.sock: ssl.SSLSocket = context.wrap_socket(
            sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
        )

    def handshake(self) -> int:
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return zmq.POLLIN
        except ssl.SSLWantWriteError:
            return zmq.POLLOUT
        return 0

    def send(self, views: list[memoryview]) -> int:
        return self._try(lambda: self.sock.send(views[0]))

    def receive(self, views: list[memoryview]) -> int:
        return self._try(lambda: self.sock.recv_into(views[0]))

    def has_more(self) -> bool:
        return self.sock.pending() > 0

    def _try(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def is_trusted(host: str, *, insecure: bool) -> bool:
    """Whether bytes may go to or from there in the clear."""
    return insecure or is_loopback(host)


def split_address(address: str) -> tuple[bool, str, int]:
    """(whether TLS is spoken there, host, port). Raises: ValueError."""
    plain = address.removeprefix(TLS_SCHEME)
    host, _, port = plain.rpartition(":")
    return plain != address, host.removeprefix("[").removesuffix("]"), int(port)
