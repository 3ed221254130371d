"""What moves bytes between registered memory: two small protocols, one for each end.

A region is a pool as bytes, a numpy array uint8 [num_blocks, block_bytes], given to a transport when it is made. A
grant's blocks, one after another, are one run of bytes; a copy names its place in that run and in D's pool, and each
transport uses the one it needs. Events come on the transport's own threads, with none of its locks held: whoever hears
them may call back.

The two promises that blocks' owners build on: after a writer is idle on a grant, nothing reads P's blocks for it; after
a reader is idle on a grant, nothing writes into D's blocks for it. Both come in bounded time after `stop`, whatever the
peer does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvrelay.connector.messages import Endpoint, GrantId

Region = Any  # numpy array, uint8 [num_blocks, block_bytes], contiguous


@dataclass(slots=True)  # not frozen: there is one for each block, and a frozen one takes thrice as long to make
class Copy:
    """`size` bytes from `start` of one of P's blocks to `start` of one of D's. Where their blocks differ, P's are those
    of its staging, which are as long as D's."""

    source_block: int
    target_block: int
    index: int  # the target's place among the grant's blocks
    start: int
    size: int


@runtime_checkable
class Talking(Protocol):
    """A link or a reader that carries the session's control messages too, behind which no other way is taken."""

    def say(self, session_nonce: bytes, message: bytes) -> bool:
        """Send, in order, without waiting. Any thread. False: the peer reads nothing, and the session must end."""


class WriterEvents(Protocol):
    """What P's side hears."""

    def heard(self, session_nonce: bytes, message: bytes) -> None:
        """What D said on a link that carries control messages."""

    def written(self, grant: GrantId, num_bytes: int) -> None:
        """So many more bytes are on their way, and are read from P's blocks no more."""

    def writer_idle(self, grant: GrantId) -> None:
        """Follows a `stop` that answered False."""

    def write_failed(self, session_nonce: bytes, reason: str) -> None:
        """The session's data connection is gone, and every grant on it."""


class Link(Protocol):
    """P's side of one session's data connection. No method waits."""

    def write(self, grant: GrantId, copies: Sequence[Copy]) -> None:
        """Queue copies; the source blocks may be read until they are written, or the writer is idle."""

    def stop(self, grant: GrantId) -> bool:
        """Write nothing more under this grant. True: the writer is idle on it now; False: `writer_idle` follows."""

    def close(self) -> None:
        """No more writes; the connection ends when the writer has left the piece it is in."""


class Writer(Protocol):
    """P's side of a transport."""

    @property
    def name(self) -> str: ...

    def reaches(self, address: str) -> bool:
        """Whether D's endpoint can be reached from here at all: shared memory only by the same user of the same host.
        Asked once a session, on the connector's thread: it waits for nothing."""

    def connect(self, session_nonce: bytes, address: str, events: WriterEvents) -> Link:
        """A link for one session. What fails later is told by `write_failed`."""

    def close(self) -> None:
        """End all links. Waits for the threads (bounded)."""


class ReaderEvents(Protocol):
    """What D's side hears. `all_in` and `reader_idle` are two-sided transports', `fenced` is one-sided ones'."""

    def heard(self, session_nonce: bytes, message: bytes) -> None:
        """What P said to a reader that carries control messages."""

    def all_in(self, grant: GrantId) -> None:
        """Every byte of the grant is in its blocks."""

    def reader_idle(self, grant: GrantId) -> None:
        """Follows a `stop` that answered False."""

    def read_failed(self, session_nonce: bytes, reason: str) -> None:
        """The session's data connection is gone, and every grant on it."""

    def fenced(self, session_nonce: bytes) -> None:
        """This session's writers can write no more, whatever P says or does."""


class Reader(Protocol):
    """D's side of a transport."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def one_sided(self) -> bool:
        """Whether P writes into D's memory by itself, so that D knows only what P says."""

    @property
    def num_dropped(self) -> int:
        """Pieces that were malformed, or under no live grant."""

    def start(self, events: ReaderEvents) -> None: ...

    def begin_session(self, session_nonce: bytes) -> None:
        """This session is open: its P may connect."""

    def accept(self, grant: GrantId, block_ids: Sequence[int], size: int | None = None) -> None:
        """From now on, bytes under this grant go into these blocks: into the first `size` bytes of each, and with
        these all is in; None: into whole blocks. A block's place in the grant's run of bytes is as if it were whole."""

    def stop(self, grant: GrantId) -> bool:
        """Bytes under this grant go nowhere from now on. True: idle on it now; False: `reader_idle` follows."""

    def end_session(self, session_nonce: bytes) -> None:
        """Nothing more comes in this session; its grants have been stopped, or wait for a fence."""

    def close(self) -> None:
        """Stop. Waits for the threads (bounded)."""
