"""CURVE on ZMQ's sockets: the cluster secret is the key of every server, so there is nothing else to hand out.

Only who knows the secret knows a server's public key, and without it no handshake gets anywhere; a client's own keys
are drawn anew for each socket. Both ends draw further keys for each connection, so that a secret that leaks later
opens nothing that was recorded. An address says that CURVE is spoken there: "curve://host:port".
"""

import hashlib
from functools import lru_cache
from typing import Any

import zmq
from zmq.utils import z85

from kvrelay.engine.config import is_loopback
from kvrelay.engine.errors import PreconditionFailed, Unauthenticated

SCHEME = "curve://"
_SALT = b"kvrelay curve server key 1"
_KEY_BYTES = 32
_OVERHEAD_BYTES = 33  # of each message: its name, a nonce, flags and the box's own; ZMQ's limit counts them


def is_due(secret: str, *hosts: str) -> bool:
    """Whether sockets under these addresses are to speak CURVE: with a secret, and beyond loopback."""
    return bool(secret) and not all(map(is_loopback, hosts))


def serve(socket: "zmq.Socket[bytes]", secret: str) -> None:
    """Take connections only of those that know the secret. Before `bind`."""
    _public, private = _server_keys(secret)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    _make_room(socket)


def prepare(socket: "zmq.Socket[bytes]", secret: str, address: str) -> str:
    """The plain address to connect to, the socket being ready for what is spoken there.

    Raises: Unauthenticated without a secret for CURVE; PreconditionFailed for an address that is in the clear and
    should not be.
    """
    plain = address.removeprefix(SCHEME)
    if plain != address:
        if not secret:
            raise Unauthenticated(f"{address} takes only those that know the cluster secret, and there is none here")
        public, private = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, _server_keys(secret)[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        _make_room(socket)
    elif (host := _host(plain)) and is_due(secret, host):  # what is no address at all fails as such
        raise PreconditionFailed(f"{address} is beyond loopback, and not encrypted although there is a cluster secret")
    return plain


def _make_room(socket: "zmq.Socket[bytes]") -> None:
    max_bytes = socket.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(max_bytes, int)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _OVERHEAD_BYTES)


def _host(address: str) -> str:
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


@lru_cache(maxsize=4)
def _server_keys(secret: str) -> tuple[bytes, bytes]:
    """(public, private), in Z85. Slow on purpose: what goes over the wire must not help to guess a short secret."""
    raw = hashlib.scrypt(secret.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=_KEY_BYTES)
    private: Any = z85.encode(raw)
    return zmq.curve_public(private), private
