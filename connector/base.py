"""KVConnector: what the nodes know of the hand-off, as two small protocols and the events that come back.

The node's engine thread calls; the connector's own thread carries messages, timeouts and leases; data threads move
bytes. No call here waits for a peer. What happens comes back as events, fetched with `events()` after the wake-up
callback has run (on the connector's thread: it must only set a flag or post to an inbox).

The rules of a transfer's life are the tables in `handoff.py`. What this file fixes is who owns blocks:

- P: blocks named in `offer` are pinned for the transfer from that call on, whatever becomes of the request, until
  `Released` comes (or `cancel` answered FREED).
- D: blocks named in `grant` belong to the transfer from that call on. They become the request's with `Landed`, or
  go back to the pool with `Released` (or `cancel` answered FREED). One of the two comes, once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Protocol

from kvrelay.connector.traffic import Traffic
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import OutputToken, RequestKey

WakeUp = Callable[[], None]


class RefuseReason(StrEnum):
    """Why D says no to an offer."""

    NO_ROOM = "NO_ROOM"
    TOO_LARGE = "TOO_LARGE"
    LAYOUT = "LAYOUT"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    SHUTDOWN = "SHUTDOWN"
    UNKNOWN = "UNKNOWN"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed elsewhere or later."""
        return self in (RefuseReason.NO_ROOM, RefuseReason.SHUTDOWN, RefuseReason.UNKNOWN)


class EndReason(StrEnum):
    """Why P writes nothing more."""

    FINISHED = "FINISHED"  # every choice ended with its first token: nothing to hand over
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    WRITE_FAILED = "WRITE_FAILED"
    SHUTDOWN = "SHUTDOWN"

    @property
    def retryable(self) -> bool:
        return self in (EndReason.WRITE_FAILED, EndReason.SHUTDOWN)


class FailReason(StrEnum):
    """What else ends a transfer."""

    REVOKED = "REVOKED"
    TIMEOUT = "TIMEOUT"
    PEER_LOST = "PEER_LOST"
    DATA_FAILED = "DATA_FAILED"
    UNKNOWN = "UNKNOWN"  # P lost D after COMMIT: only D knows what came of it

    @property
    def retryable(self) -> bool:
        return self in (FailReason.REVOKED, FailReason.PEER_LOST, FailReason.DATA_FAILED)


Reason = RefuseReason | EndReason | FailReason


class CancelOutcome(Enum):
    """What `cancel` found."""

    FREED = auto()  # the blocks are the caller's again, now; no Released follows
    PENDING = auto()  # someone may still touch them; Released follows
    UNKNOWN = auto()  # no such transfer here, or it has already ended (its event is on the way or was fetched)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, end) by absolute position in the prompt."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """P holds every block of a prompt, and will push them. `block_ids[i]` holds tokens [i*B, (i+1)*B)."""

    key: RequestKey
    peer_epoch: str
    num_tokens: int
    token_digest: bytes
    block_ids: tuple[int, ...]
    deadline: float  # this process's monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The router has called D for a request whose KV `peer_epoch` will offer."""

    key: RequestKey
    peer_epoch: str
    num_tokens: int
    token_digest: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class GrantedRange:
    """Where D wants tokens [start, end): `start` lies on a block boundary; block_ids in order of position."""

    start: int
    end: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrantPlan:
    """Which tokens D misses, and where they go. No ranges: D has them all; the transfer still ends in a commit."""

    ranges: tuple[GrantedRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What COMMIT carries beside the bytes: each choice's first token, sampled on P, and `block_digests` of every
    prompt block, if digests are on."""

    first_tokens: tuple[OutputToken, ...]
    num_cached_tokens: int = 0
    block_digests: tuple[bytes, ...] = ()


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionUp:
    """A session with this peer is open; transfers may name it."""

    peer_epoch: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session is over; the ends of its transfers come as events of their own."""

    peer_epoch: str
    reason: str


@dataclass(frozen=True, slots=True)
class Offered:
    """D: both the router's call and P's offer are here; answer with `grant` or `refuse`."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """D: every byte is in and the commit has come; the granted blocks are the request's now."""

    key: RequestKey
    handover: Handover
    num_bytes: int
    transfer_s: float  # granted -> landed
    transport: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """P: D has acknowledged. Released follows."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer ended without success. EndReason.FINISHED on D means: P has sent all there is."""

    key: RequestKey
    reason: Reason
    retryable: bool


@dataclass(frozen=True, slots=True)
class Released:
    """The transfer's blocks may be given back to the pool: no write and no read can reach them any more."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Quarantined:
    """D: a write may still reach the transfer's blocks, and nobody can say until when. Released follows some day."""

    key: RequestKey


TransferEvent = SessionUp | SessionLost | Offered | Landed | Delivered | Failed | Released | Quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorStatistics:
    """A snapshot for /metrics and Stats."""

    states: dict[str, int]  # live transfers by state
    sessions: dict[str, str]  # open ones: the peer's epoch, and the transport that moves bytes
    num_landed: int = 0  # delivered, on P
    num_failed: int = 0
    num_bytes: int = 0
    num_quarantined_blocks: int = 0
    num_dropped: int = 0  # messages and pieces that were malformed or not meant
    transports: dict[str, Traffic] = field(default_factory=dict)  # those that have moved anything


class KVSender(Protocol):
    """P's half. Every method may be called from the engine thread only; none blocks."""

    def connect(self, peer_epoch: str, address: str) -> None:
        """Open a session with D's control socket; SessionUp or SessionLost follows. Known peers are ignored."""

    def disconnect(self, peer_epoch: str) -> None:
        """Forget a peer that the router no longer knows."""

    def offer(self, offer: Offer) -> None:
        """Pin the blocks and tell D. Without a session: Failed(PEER_LOST) and Released follow."""

    def push(self, key: RequestKey, tokens: TokenRange, layers: range | None = None) -> None:
        """These tokens' KV is final in the offered blocks: it may be read from now on, and is sent when granted.

        Ranges are block-aligned, except that the last ends at num_tokens. `layers`: all by default.
        """

    def commit(self, key: RequestKey, handover: Handover) -> None:
        """Everything is pushed; say COMMIT behind the last byte."""

    def cancel(self, key: RequestKey, reason: EndReason) -> CancelOutcome:
        """Stop, and tell D why. FINISHED is the good end of a request that has nothing to hand over."""

    def events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""

    def statistics(self) -> ConnectorStatistics: ...

    def close(self) -> None:
        """End every transfer with SHUTDOWN, then stop the threads. Blocks until they have stopped (bounded)."""


class KVReceiver(Protocol):
    """D's half. Every method may be called from the engine thread only; none blocks."""

    def expect(self, expectation: Expectation) -> None:
        """The router has called. Offered follows when P's offer is here too; Failed if the session is not."""

    def grant(self, key: RequestKey, plan: GrantPlan) -> None:
        """Answer Offered. If the transfer has ended meanwhile, Released follows for these blocks all the same."""

    def refuse(self, key: RequestKey, reason: RefuseReason) -> None:
        """Answer Offered with no; nothing follows."""

    def cancel(self, key: RequestKey) -> CancelOutcome:
        """The request is gone. After PENDING, Released follows; no Landed does."""

    def events(self) -> list[TransferEvent]: ...

    def describe(self) -> KVLayout: ...

    def address(self) -> str:
        """host:port of the control socket, to be advertised."""

    def statistics(self) -> ConnectorStatistics: ...

    def close(self) -> None: ...
