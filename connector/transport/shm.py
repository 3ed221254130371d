"""KV bytes between two processes of one user on one host: P maps D's pool, and copies straight into the granted blocks.

One-sided: D takes no part in a copy and learns of it only by what P says. So D hands its pool out to the P of an open
session alone, once (`shm_reader.py`), and has blocks that were granted back when P has unmapped the pool or is gone.
A copy that would reach outside one block of D's pool, whatever D has granted, fails the session and is not made.
"""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kvrelay.connector.loop import Timer
from kvrelay.connector.transport import shm_wire
from kvrelay.connector.transport.base import Copy, Region, WriterEvents
from kvrelay.connector.transport.link import Links, QueuedLink
from kvrelay.connector.transport.shm_talk import Talk
from kvrelay.connector.transport.shm_wire import HANDSHAKE_S, NAME, PoolShape
from kvrelay.engine.clock import Clock
from kvrelay.engine.copies import Pieces, get_copy_pieces
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.shared_memory import SharedMemory, is_sealed, lower_priority

Batch = Any  # numpy array, uint64 [num_copies, 4]: source block, target block, start, size

_BATCH_BYTES = 8 * 2**20  # in one call: what a cancel waits for at most
_MAX_BATCHES = 4  # written before the socket has its turn
_MAX_UNSAID = 4096  # messages, while the pool has not come
_MAX_READS = 256  # messages handled before others have their turn
_MAX_UNREACHED = 1024
_fields_of = attrgetter("source_block", "target_block", "start", "size")


class ShmWriter:
    """P's side: one mapping of D's pool and one thread for each session."""

    name = NAME

    def __init__(self, region: Region, clock: Clock, secret: str) -> None:
        self._region = region
        self._clock = clock
        self._secret = secret
        self._copy_pieces = get_copy_pieces()
        self._unmapped: set[str] = set()  # addresses of pools that this process could not map
        self._links: Links[ShmLink] = Links(NAME)

    def reaches(self, address: str) -> bool:
        if address in self._unmapped:
            return False
        try:
            shm_wire.dial(address).close()
        except OSError:
            return False
        return True

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "ShmLink":
        return self._links.start(
            ShmLink(
                self._region,
                self._clock,
                self._secret,
                self._copy_pieces,
                session_nonce,
                address,
                self._could_not_map,
                events,
            )
        )

    def close(self) -> None:
        self._links.close()

    def _could_not_map(self, address: str) -> None:
        """Whatever moves bytes in the next session, it is not this."""
        if len(self._unmapped) < _MAX_UNREACHED:
            self._unmapped.add(address)


class ShmLink(QueuedLink[Batch]):
    """The way from P's region to one D's pool."""

    def __init__(
        self,
        region: Region,
        clock: Clock,
        secret: str,
        copy_pieces: Callable[[Pieces], None],
        session_nonce: bytes,
        address: str,
        could_not_map: Callable[[str], None],
        events: WriterEvents,
    ) -> None:
        super().__init__(NAME, clock, session_nonce, address, events, _batches)
        self._region = region
        self._secret = secret
        self._copy_pieces = copy_pieces
        self._could_not_map = could_not_map
        self._unsaid: list[bytes] = []  # before the pool has come, guarded by the lock
        self._lock = threading.Lock()
        self._talk: Talk | None = None
        self._timer: Timer | None = None
        self._pool: _MappedPool | None = None

    def say(self, session_nonce: bytes, message: bytes) -> bool:
        with self._lock:
            if self._pool is None or self._talk is None:
                self._unsaid.append(message)
                return len(self._unsaid) <= _MAX_UNSAID
            return self._talk.say(message)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        try:
            connection = shm_wire.dial(self._address)
        except OSError as error:
            self._fail(f"cannot reach the decode node: {error}")
            return
        self._talk = Talk(self._loop, connection, self._read)
        try:
            connection.send(shm_wire.write_hello(self._session_nonce, self._secret))
        except OSError as error:
            self._fail(f"cannot reach the decode node: {error}")
            return
        self._talk.watch()
        self._timer = self._loop.call_in(HANDSHAKE_S, lambda: self._fail(f"no pool for {HANDSHAKE_S:g} s"))

    def _read(self) -> None:
        """The pool comes; after it, what D says, and the end."""
        for _ in range(_MAX_READS):
            if self._talk is None:
                return
            if self._pool is None:
                self._take_pool(self._talk.socket)
                return
            try:
                message = self._talk.read()
            except InvalidArgument as error:
                self._fail(f"malformed message: {error.message}")
                return
            if message is None:
                return
            if not message:
                self._fail("the decode node ended the connection")
                return
            self._events.heard(self._session_nonce, message)

    def _take_pool(self, connection: socket.socket) -> None:
        try:
            shape, descriptor = shm_wire.receive_pool(connection)
        except (OSError, InvalidArgument) as error:
            self._fail(f"no pool: {error}")
            return
        try:
            pool = _MappedPool(shape, descriptor, self._region)
        except OSError as error:
            self._could_not_map(self._address)
            self._fail(f"cannot map the decode node's pool: {error}")
            return
        assert self._timer is not None
        assert self._talk is not None
        self._timer.cancel()
        with self._lock:
            self._pool = pool
            for message in self._unsaid:
                self._talk.say(message)
            self._unsaid.clear()
        self._work()

    def _work(self) -> None:
        for _ in range(_MAX_BATCHES):
            if self._pool is None or (work := self._queue.begin()) is None:
                return
            grant, batch = work
            wrong = ""
            try:
                pieces = self._pool.place(batch)
            except InvalidArgument as error:
                wrong = error.message
            else:
                self._copy_pieces(pieces)
            if self._queue.end():
                self._events.writer_idle(grant)
            elif wrong:
                self._fail(wrong)
            else:
                self._events.written(grant, int(batch[:, 3].sum()))
        if self._queue:
            self._loop.post(self._work)

    def _hang_up(self) -> None:
        """The pool first: the connection's end says to D that nothing here can reach it any more."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.unmap()
        if self._talk is not None:
            self._talk.close()
            self._talk = None


class _MappedPool:
    """D's pool in this process. A thread fetches its pages, so that no transfer waits for them."""

    def __init__(self, shape: PoolShape, descriptor: int, region: Region) -> None:
        """Raises: OSError."""
        self._shape = shape
        if not is_sealed(descriptor):  # it could be cut off under a copy, and the process with it
            os.close(descriptor)
            raise OSError("its size is not sealed")
        self._memory = SharedMemory(descriptor, shape.num_bytes)
        num_blocks, block_bytes = region.shape
        self._most = min(block_bytes, shape.block_bytes)  # of one copy
        self._limits = np.array([num_blocks, shape.num_blocks, self._most + 1, self._most + 1], np.uint64)
        # From the columns of a batch to addresses and a size.
        self._strides = np.array([[block_bytes, 0, 0], [0, shape.block_bytes, 0], [1, 1, 0], [0, 0, 1]], np.uint64)
        self._starts = np.array([region.ctypes.data, self._memory.address, 0], np.uint64)
        self._is_over = threading.Event()
        self._populating = threading.Thread(target=self._populate, name=f"kv-map-{NAME}", daemon=True)
        self._populating.start()

    def place(self, batch: Batch) -> Pieces:
        """Addresses for a batch of copies, as `_batches` makes them.

        Raises: InvalidArgument if any does not lie in one block of either pool.
        """
        if not ((batch < self._limits).all() and (batch[:, 2] + batch[:, 3] <= self._most).all()):
            raise InvalidArgument("copies", batch[0].tolist(), f"one is not in a block of D's pool, {self._shape}")
        pieces: Pieces = batch @ self._strides + self._starts
        return pieces

    def unmap(self) -> None:
        self._is_over.set()
        self._populating.join()  # a few milliseconds: it fetches 2 MiB at a time
        self._memory.unmap()

    def _populate(self) -> None:
        lower_priority()
        self._memory.populate(self._is_over.is_set)


def _batches(copies: Sequence[Copy]) -> list[Batch]:
    """Copies as rows, about _BATCH_BYTES at a time. What is negative becomes too large for any pool."""
    flat = itertools.chain.from_iterable(map(_fields_of, copies))
    rows = np.fromiter(flat, np.int64, 4 * len(copies)).view(np.uint64).reshape(-1, 4)
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(np.diff(np.cumsum(rows[:, 3]) // _BATCH_BYTES)) + 1)
