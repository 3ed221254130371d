"""What a shared-memory connection says on its Unix socket, and who may be at the other end of it.

    P -> D   HELLO: the session's nonce, and P's proof that it may have the pool in this session
    D -> P   POOL: the pool's shape, and its memfd beside it
    P -> D   the end: P has unmapped the pool, or is gone

The socket lies in a folder that only this user can enter, and each side asks the kernel who the other is.
"""

import hashlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvrelay.connector.wire import SESSION_NONCE_BYTES
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.secret import prove, verify

NAME = "shm"
HANDSHAKE_S = 5.0
_HELLO = struct.Struct(f"8s{SESSION_NONCE_BYTES}s32s")
_POOL = struct.Struct("<8sQQ")
_HELLO_MAGIC, _POOL_MAGIC = b"kvshmP01", b"kvshmD01"
_SPEAKER = "shm"  # in the proof, which is then none for any other purpose
_SO_PEERPIDFD = 77  # Linux 6.5
_PEER_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class PoolShape:
    """D's pool, as D describes it."""

    num_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def make_address(path: str) -> str:
    return f"{_host()}:{path}"


def path_on_this_host(address: str) -> str | None:
    """The socket's path; None if it lies on another host."""
    host, _, path = address.partition(":")
    return path if path and host == _host() else None


def dial(address: str) -> socket.socket:
    """A connection to the D at this address. Waits for nothing.

    Raises: OSError (PermissionError: D is another user's).
    """
    path = path_on_this_host(address)
    if path is None:
        raise OSError("the address is of another host")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
        if not is_same_user(connection):
            raise PermissionError("the decode node is another user's")
    except OSError:
        connection.close()
        raise
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Raises: OSError."""
    return _peer(connection)[1] == os.geteuid()


def open_peer(connection: socket.socket) -> int | None:
    """A descriptor of the process at the other end, readable once it has exited; None where there is no such thing."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(_peer(connection)[0])
    except OSError:  # an older kernel, or a process that is out of sight
        return None


def write_hello(session_nonce: bytes, secret: str) -> bytes:
    return _HELLO.pack(_HELLO_MAGIC, session_nonce, prove(secret, _SPEAKER, session_nonce))


def read_hello(message: bytes, secret: str) -> bytes:
    """The session's nonce. Raises: InvalidArgument for what is malformed or not proved."""
    if len(message) != _HELLO.size or not message.startswith(_HELLO_MAGIC):
        raise InvalidArgument("hello", message[:8], "is none")
    _, session_nonce, proof = _HELLO.unpack(message)
    if not verify(secret, proof, _SPEAKER, session_nonce):
        raise InvalidArgument("proof", proof, "is not of this session and secret")
    return bytes(session_nonce)


def send_pool(connection: socket.socket, shape: PoolShape, descriptor: int) -> None:
    """Raises: OSError."""
    socket.send_fds(connection, [_POOL.pack(_POOL_MAGIC, shape.num_blocks, shape.block_bytes)], [descriptor])


def receive_pool(connection: socket.socket) -> tuple[PoolShape, int]:
    """The pool's shape and descriptor, which is the caller's. Raises: OSError; InvalidArgument."""
    message, descriptors, _flags, _ = socket.recv_fds(connection, _POOL.size + 1, 1, socket.MSG_CMSG_CLOEXEC)
    if len(message) == _POOL.size and len(descriptors) == 1:
        magic, num_blocks, block_bytes = _POOL.unpack(message)
        shape = PoolShape(num_blocks, block_bytes)
        if magic == _POOL_MAGIC and 0 < shape.num_bytes <= os.fstat(descriptors[0]).st_size:
            return shape, descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    raise InvalidArgument("pool", message[:8], "D refuses" if not message else "is none, or less than it says")


HELLO_BYTES = _HELLO.size


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Its process and user, as the kernel knows them. Raises: OSError."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _gid = _PEER_CREDENTIALS.unpack(found)
    return pid, uid


def _host() -> str:
    """A name of this host since it was booted."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return hashlib.sha256(boot_id.read_bytes()).hexdigest()[:16]
