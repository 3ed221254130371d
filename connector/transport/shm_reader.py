"""D's side of shared memory: hands the pool's memfd to the P of each open session, and sees when P can write no more.

It moves no byte of KV, but carries the session's messages. What it watches are ends: P's end of the connection closes
after P has unmapped the pool, or with P; and P's exit is seen by the kernel's word alone, whoever else may have
inherited the connection.
"""

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import zmq

from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Endpoint, GrantId
from kvrelay.connector.transport import shm_wire
from kvrelay.connector.transport.base import ReaderEvents, Region
from kvrelay.connector.transport.shm_talk import Talk
from kvrelay.connector.transport.shm_wire import HANDSHAKE_S, NAME, PoolShape
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ConfigError, InvalidArgument
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

_BACKLOG = 64
_MAX_CONNECTIONS = 2048  # open, strangers' and those that P still holds after its session
_MAX_STRANGERS = 64  # that have not said HELLO yet
_MAX_ACCEPTS = 16  # before others have their turn
_MAX_READS = 256  # messages handled before others have their turn
_PAUSE_S = 1.0  # without room for another descriptor
_SAY_END_S = 0.1  # after a connection's end: what P said before it on the control connection comes first
_STOP_S = 5.0
_PREFIX, _SOCKET = "kvrelay-", "pool"
_SWEPT_AFTER_S = 60.0


@dataclass(slots=True, eq=False)
class _Connection:
    """A process that has the pool, or may get it."""

    talk: Talk
    session_nonce: bytes = b""  # once it has the pool
    process: int | None = None  # a descriptor: readable when it has exited
    timer: Timer | None = None


class ShmReader:
    """D's side: one listening socket and one thread for all sessions."""

    one_sided = True

    def __init__(self, region: Region, descriptor: int, clock: Clock, secret: str) -> None:
        """`descriptor`: a memfd whose bytes from 0 on are the region; it stays the caller's. Raises: ConfigError."""
        self.num_dropped = 0
        self._shape = PoolShape(*region.shape)
        self._descriptor = descriptor
        self._secret = secret
        self._events: ReaderEvents | None = None
        self._lock = threading.Lock()  # guards the next two
        self._awaited: set[bytes] = set()  # open sessions whose P has not come for the pool
        self._admitted: dict[bytes, _Connection] = {}  # by session nonce
        self._connections: set[_Connection] = set()  # all
        self._folder, self._listener = _listen()
        self.endpoint = Endpoint(NAME, shm_wire.make_address(self._listener.getsockname()))
        self._loop = Loop(f"kv-read-{NAME}", clock)

    def start(self, events: ReaderEvents) -> None:
        self._events = events
        self._loop.start()
        self._loop.post(self._watch_listener)

    def begin_session(self, session_nonce: bytes) -> None:
        with self._lock:
            self._awaited.add(session_nonce)

    def end_session(self, session_nonce: bytes) -> None:
        """P is told, should it not know: then it unmaps the pool. If it never had it, nobody can write."""
        assert self._events is not None
        with self._lock:
            never_came = session_nonce in self._awaited
            self._awaited.discard(session_nonce)
            connection = self._admitted.get(session_nonce)
        if never_came:
            self._events.fenced(session_nonce)
        elif connection is not None:
            self._loop.post(partial(self._say_end, connection))

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        """Nothing to prepare: P names the blocks."""

    def stop(self, grant: GrantId) -> bool:
        return True

    def say(self, session_nonce: bytes, message: bytes) -> bool:
        with self._lock:
            connection = self._admitted.get(session_nonce)
        return connection is None or connection.talk.say(message)

    def close(self) -> None:
        if not self._loop.is_running():  # D could not start
            self._hang_up()
        self._loop.post(self._hang_up)
        if not self._loop.stop(_STOP_S):
            log.error("reader_stuck", extra=fields(transport=NAME))

    # --- the thread ----------------------------------------------------------------------------------------------

    def _watch_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.watch(self._listener.fileno(), zmq.POLLIN, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no room for a descriptor: it would be ready for ever
                log.error("accept_failed", extra=fields(transport=NAME, error=str(error)))
                self._loop.unwatch(self._listener.fileno())
                self._loop.call_in(_PAUSE_S, self._watch_listener)
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        num_strangers = len(self._connections) - len(self._admitted)
        has_room = len(self._connections) < _MAX_CONNECTIONS and num_strangers < _MAX_STRANGERS
        if not has_room or not shm_wire.is_same_user(accepted):
            self.num_dropped += 1
            accepted.close()
            return
        talk = Talk(self._loop, accepted, lambda: self._read(connection))
        connection = _Connection(talk)
        connection.timer = self._loop.call_in(HANDSHAKE_S, partial(self._drop, connection))
        self._connections.add(connection)
        talk.watch()

    def _read(self, connection: _Connection) -> None:
        if not connection.session_nonce:
            self._read_hello(connection)
            return
        assert self._events is not None
        for _ in range(_MAX_READS):
            if connection not in self._connections:
                return
            try:
                message = connection.talk.read()
            except InvalidArgument as error:
                self.num_dropped += 1
                self._events.read_failed(connection.session_nonce, f"malformed message: {error.message}")
                return
            if message is None:
                return
            if not message:
                self._end(connection, "the prefill node ended the connection")
                return
            self._events.heard(connection.session_nonce, message)

    def _read_hello(self, connection: _Connection) -> None:
        try:
            message = connection.talk.socket.recv(shm_wire.HELLO_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            self._take_hello(connection, message)
        else:
            self._forget(connection)  # it only looked whether somebody is here

    def _take_hello(self, connection: _Connection, message: bytes) -> None:
        """Each open session gets the pool once."""
        try:
            session_nonce = shm_wire.read_hello(message, self._secret)
        except InvalidArgument as error:
            log.debug("hello_dropped", extra=fields(transport=NAME, error=error.message))
            self._drop(connection)
            return
        connection.process = shm_wire.open_peer(connection.talk.socket)
        with self._lock:
            if session_nonce not in self._awaited:
                is_open = False
            else:
                is_open = True
                self._awaited.remove(session_nonce)
                self._admitted[session_nonce] = connection
        if not is_open:
            self._drop(connection)
            return
        connection.session_nonce = session_nonce
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.process is not None:
            self._loop.watch(connection.process, zmq.POLLIN, partial(self._end, connection, "the prefill node exited"))
        try:
            shm_wire.send_pool(connection.talk.socket, self._shape, self._descriptor)
        except OSError as error:
            self._end(connection, f"the prefill node does not take the pool: {error}")

    def _say_end(self, connection: _Connection) -> None:
        if connection in self._connections:
            with contextlib.suppress(OSError):  # it has gone already
                connection.talk.socket.shutdown(socket.SHUT_WR)

    def _end(self, connection: _Connection, reason: str) -> None:
        """P has no way left into the pool."""
        assert self._events is not None
        nonce = connection.session_nonce
        self._forget(connection)
        self._events.fenced(nonce)
        self._loop.call_in(_SAY_END_S, partial(self._events.read_failed, nonce, reason))

    def _drop(self, connection: _Connection) -> None:
        self.num_dropped += 1
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._admitted.pop(connection.session_nonce, None)
        self._connections.discard(connection)
        if connection.timer is not None:
            connection.timer.cancel()
        connection.talk.close()
        if connection.process is not None:
            if connection.session_nonce:
                self._loop.unwatch(connection.process)
            os.close(connection.process)

    def _hang_up(self) -> None:
        for connection in list(self._connections):
            self._forget(connection)
        if self._listener.fileno() >= 0:
            with contextlib.suppress(KeyError):  # it may pause
                self._loop.unwatch(self._listener.fileno())
            path = self._listener.getsockname()
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.rmdir(self._folder)


def _listen() -> tuple[str, socket.socket]:
    """A folder that only this user can enter, and a socket in it. Raises: ConfigError."""
    reason = ""
    for parent in _runtime_folders():
        _sweep(parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            path = os.path.join(folder, _SOCKET)
            listener.bind(path)  # an OSError too where the path is too long for a socket
            os.chmod(path, 0o600)
            listener.listen(_BACKLOG)
            return folder, listener
        except OSError as error:
            reason = str(error)
            listener.close()
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    raise ConfigError(f"cannot listen for shared memory: {reason}")


def _sweep(parent: str) -> None:
    """Remove what readers of this user left behind that were killed: sockets at which nobody listens any more.

    A process id would not tell: the folder may be shared with other containers, whose processes are out of sight.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False) and _is_left_behind(entry):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(entry.path, _SOCKET))
                    os.rmdir(entry.path)


def _is_left_behind(folder: "os.DirEntry[str]") -> bool:
    found = folder.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _SWEPT_AFTER_S:  # it may be about to listen
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(os.path.join(folder.path, _SOCKET))
        except ConnectionRefusedError:
            return True
        except OSError:  # it is full, or no folder of ours
            return False
    return False


def _runtime_folders() -> Iterator[str]:
    """The user's own, which is swept when the user leaves; then those for temporary files."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(folder):
        yield folder
    yield tempfile.gettempdir()
    yield "/tmp"
