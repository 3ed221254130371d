"""Where a live grant's bytes go on D, for transports whose pieces D itself puts into its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.connector.intervals import Intervals
from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport.base import ReaderEvents
from kvrelay.connector.transport.queue import InHand
from kvrelay.engine.errors import InvalidArgument

_MAX_GAPS = 65_536  # in what has come of one grant


@dataclass(slots=True, eq=False)
class Target:
    """One grant's blocks, and which of their bytes have come: each is counted once, however often it comes."""

    block_ids: tuple[int, ...]
    block_bytes: int
    part: int  # how much of each block comes: its first bytes
    is_live: bool = True
    received: Intervals = field(default_factory=Intervals)

    @classmethod
    def of(cls, block_ids: Sequence[int], block_bytes: int, part: int | None = None) -> "Target":
        """`part`: None for whole blocks."""
        return cls(tuple(block_ids), block_bytes, block_bytes if part is None else part)

    @property
    def size(self) -> int:
        """Of what comes, in bytes."""
        return len(self.block_ids) * self.part

    @property
    def is_complete(self) -> bool:
        return self.received.total == self.size

    def check(self, offset: int, size: int) -> None:
        """Raises: InvalidArgument for a piece that reaches outside the grant, or scatters it beyond reason."""
        start, end = offset, offset + size
        if self.part != self.block_bytes:  # a piece lies in one block
            index, start = divmod(offset, self.block_bytes)
            end = start + size if index < len(self.block_ids) else self.block_bytes
            if end > self.part:
                raise InvalidArgument("offset", offset, f"{size} bytes from there: only {self.part} of a block come")
        elif end > self.size:
            raise InvalidArgument("offset", offset, f"{size} bytes from there do not lie in a grant of {self.size}")
        if not size:
            raise InvalidArgument("size", size, "must be positive")
        if len(self.received) >= _MAX_GAPS:
            raise InvalidArgument("offset", offset, f"the grant has {_MAX_GAPS} gaps already")

    def views(self, pool: memoryview, offset: int, size: int) -> list[memoryview]:
        """The places in the pool of `size` bytes at `offset` of the grant, which were checked."""
        block_bytes = self.block_bytes
        first, skipped = divmod(offset, block_bytes)
        last, rest = divmod(offset + size, block_bytes)
        found = [pool[i * block_bytes : (i + 1) * block_bytes] for i in self.block_ids[first : last + (rest > 0)]]
        if rest:
            found[-1] = found[-1][:rest]
        found[0] = found[0][skipped:]
        return found

    def scatter(self, pool: memoryview, offset: int, data: memoryview) -> None:
        """Copy a piece, which was checked, to its places in the pool."""
        at = 0
        for view in self.views(pool, offset, len(data)):
            view[:] = data[at : at + len(view)]
            at += len(view)


Scatter = Callable[[Target, int, memoryview], None]


class Targets:
    """The live grants of a reader, whose one thread puts a piece at a time into their blocks."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._in_hand = InHand()
        self.lock = self._in_hand.lock  # guards the live ones; a reader may guard more by it
        self._live: dict[GrantId, Target] = {}

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None) -> None:
        with self.lock:
            self._live[grant] = Target.of(block_ids, self._block_bytes, size)

    def stop(self, grant: GrantId) -> bool:
        """Whether the thread is idle on the grant; else its piece ends with `reader_idle`."""
        with self.lock:
            self._live.pop(grant, None)
            return self._in_hand.stop(grant)

    def check(self, grant: GrantId, offset: int, size: int) -> None:
        """Raises: InvalidArgument for a piece that does not belong into a live grant."""
        with self.lock:
            self._find(grant, offset, size)

    def take(self, grant: GrantId, offset: int, data: memoryview, scatter: Scatter, events: ReaderEvents) -> None:
        """Put a piece into its blocks by `scatter`, without the lock, and say what came of it.

        Raises: InvalidArgument for a piece that does not belong into a live grant.
        """
        with self.lock:
            target = self._find(grant, offset, len(data))
            self._in_hand.begin(grant)
        scatter(target, offset, data)
        with self.lock:
            stopped = self._in_hand.end()
            target.received.add(offset, offset + len(data))
            is_complete = target.is_complete
            if is_complete:
                self._live.pop(grant, None)  # nothing may be written into landed blocks
        if stopped:
            events.reader_idle(grant)
        elif is_complete:
            events.all_in(grant)

    def _find(self, grant: GrantId, offset: int, size: int) -> Target:
        target = self._live.get(grant)
        if target is None:
            raise InvalidArgument("grant", grant.key, "is not live")
        target.check(offset, size)
        return target
