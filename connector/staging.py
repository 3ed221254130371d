"""P's bounded room in which blocks take the form in which they travel, and the writers that read them there.

A StagedWriter stands before a transport's own writer, whose region is the staging: to the sender it is a writer like
any other, to the transport the staging is a pool like any other. Its rows are as long as D's blocks, so that a place
in D's pool and in a grant's run of bytes is where it always is; of each row only what travels is used.

One thread packs for all sessions. It reads P's blocks, so a writer is idle on a grant when both have left it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvrelay.connector.checksum import block_digest
from kvrelay.connector.convert import Packer
from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import GrantId
from kvrelay.connector.plan import Recast
from kvrelay.connector.transit import Transit
from kvrelay.connector.transport.base import Copy, Link, Region, Talking, Writer, WriterEvents

STAGING_BYTES = 2**26  # for all peers of one layout
_MAX_SHARE = 4  # a session may hold one in so many of its slots: a D that reads nothing stops no other
_MAX_BATCH_BYTES = 2**20  # packed before they are given to the transport, and before another session has its turn

MakeWriter = Callable[[Region], Writer]


class Slots:
    """Which rows of the staging are free. Any thread."""

    def __init__(self, count: int) -> None:
        self.max_share = max(1, count // _MAX_SHARE)
        self._lock = threading.Lock()
        self._free = list(range(count))
        self._waiting: dict[Callable[[], None], None] = {}  # of links that found none, each once

    def take(self, wanted: int, when_some: Callable[[], None]) -> list[int]:
        """As many as there are, at most `wanted`. If there are none, `when_some` is called when there are."""
        with self._lock:
            if not self._free:
                self._waiting[when_some] = None
                return []
            taken = self._free[-wanted:]
            del self._free[-wanted:]
            return taken

    def give(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free += slots
            woken, self._waiting = self._waiting, {}
        for when_some in woken:
            when_some()

    def num_free(self) -> int:
        with self._lock:
            return len(self._free)


class StagedWriter:
    """A transport's writer over a staging of its own, for every D of one layout."""

    def __init__(self, make: MakeWriter, region: Region, transit: Transit, loop: Loop) -> None:
        num_slots = max(_MAX_SHARE, STAGING_BYTES // transit.target.block_bytes)
        self.staging = np.empty((num_slots, transit.target.block_bytes), np.uint8)  # pages come with their first use
        self.slots = Slots(num_slots)
        self._inner = make(self.staging)
        self._packer = Packer(transit, region)
        self._transit = transit
        self._loop = loop

    @property
    def name(self) -> str:
        return self._inner.name

    def reaches(self, address: str) -> bool:
        return self._inner.reaches(address)

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> "StagedLink":
        link = StagedLink(self.staging, self.slots, self._packer, self._transit.block_bytes, self._loop, events)
        link.attach(self._inner.connect(session_nonce, address, link))
        return link

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True, eq=False)
class _Grant:
    """What stands in the staging for one grant."""

    slots: list[int] = field(default_factory=list)
    num_unwritten: int = 0  # bytes in them


class StagedLink:
    """One session's way through the staging. Implements Link, and WriterEvents for the transport's own link.

    The lock is held for bookkeeping only: neither while bytes move nor while another's method runs.
    """

    inner: Link
    say: Callable[[bytes, bytes], bool]  # the inner link's; where that carries no messages, neither does this

    def __init__(
        self, staging: Region, slots: Slots, packer: Packer, size: int, loop: Loop, events: WriterEvents
    ) -> None:
        self._staging = staging
        self._slots = slots
        self._packer = packer
        self._size = size  # of a block, as it travels
        self._loop = loop
        self._events = events
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[tuple[GrantId, Recast]] = deque()
        self._grants: dict[GrantId, _Grant] = {}
        self._num_held = 0  # slots
        self._in_hand: GrantId | None = None
        self._is_stopped = False  # the grant in hand

    def attach(self, inner: Link) -> None:
        self.inner = inner
        if isinstance(inner, Talking):
            self.say = inner.say

    # --- Link

    def write(self, grant: GrantId, copies: Sequence[Copy]) -> None:
        with self._lock:
            for copy in copies:
                assert isinstance(copy, Recast)
                self._waiting.append((grant, copy))
        self._loop.post(self._work)

    def stop(self, grant: GrantId) -> bool:
        with self._lock:
            self._waiting = deque((other, recast) for other, recast in self._waiting if other != grant)
            if self._in_hand == grant:
                self._is_stopped = True
                return False
        return self._stop_inner(grant)

    def close(self) -> None:
        with self._lock:
            self._waiting.clear()
        self.inner.close()

    # --- the packing thread

    def _work(self) -> None:
        """Pack and send a batch, then stand in line again behind other sessions."""
        batch = self._begin()
        if batch is None:
            return
        grant, recasts, slots = batch
        for recast, slot in zip(recasts, slots, strict=True):
            packed = self._staging[slot, : self._size]
            self._packer.pack(recast.sources, recast.tokens, packed)
            if recast.digests is not None:
                recast.digests[recast.index] = block_digest(packed)
        with self._lock:
            is_stopped = self._is_stopped
            if not is_stopped:
                held = self._grants.setdefault(grant, _Grant())
                held.slots += slots
                held.num_unwritten += len(slots) * self._size
        if is_stopped:
            self._give(slots)
        else:  # still in hand: a stop meanwhile waits for what this adds
            self.inner.write(grant, [replace(r, source_block=slot) for r, slot in zip(recasts, slots, strict=True)])
        with self._lock:
            self._in_hand, is_stopped = None, self._is_stopped
        if is_stopped and self._stop_inner(grant):
            self._events.writer_idle(grant)
        self._loop.post(self._work)

    def _begin(self) -> tuple[GrantId, list[Recast], list[int]] | None:
        """Blocks of one grant to pack, and where; the grant is in hand from now on."""
        with self._lock:
            if not self._waiting or self._in_hand is not None:
                return None
            grant = self._waiting[0][0]
            wanted = max(1, _MAX_BATCH_BYTES // self._size)
            wanted = min(wanted, len(self._waiting), self._slots.max_share - self._num_held)
            wanted = next((i for i in range(wanted) if self._waiting[i][0] != grant), wanted)
            if wanted <= 0:  # its share is used up; `written` goes on
                return None
            slots = self._slots.take(wanted, self._wake)
            if not slots:
                return None
            self._num_held += len(slots)
            self._in_hand, self._is_stopped = grant, False
            return grant, [self._waiting.popleft()[1] for _ in slots], slots

    def _wake(self) -> None:
        self._loop.post(self._work)

    def _stop_inner(self, grant: GrantId) -> bool:
        """Whether the transport's own writer is idle on the grant; then its slots are free."""
        if not self.inner.stop(grant):
            return False
        self._free(grant)
        return True

    def _free(self, grant: GrantId) -> None:
        with self._lock:
            held = self._grants.pop(grant, None)
        if held is not None:
            self._give(held.slots)

    def _give(self, slots: list[int]) -> None:
        with self._lock:
            self._num_held -= len(slots)
        self._slots.give(slots)
        self._wake()

    # --- WriterEvents, of the transport's own link, on its thread

    def heard(self, session_nonce: bytes, message: bytes) -> None:
        self._events.heard(session_nonce, message)

    def written(self, grant: GrantId, num_bytes: int) -> None:
        free: list[int] = []
        with self._lock:
            held = self._grants.get(grant)
            if held is not None:
                held.num_unwritten -= num_bytes
                if held.num_unwritten == 0:
                    free = self._grants.pop(grant).slots
        if free:
            self._give(free)
        self._events.written(grant, num_bytes)

    def writer_idle(self, grant: GrantId) -> None:
        self._free(grant)
        self._events.writer_idle(grant)

    def write_failed(self, session_nonce: bytes, reason: str) -> None:
        self._events.write_failed(session_nonce, reason)
