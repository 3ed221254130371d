"""What two connectors say to each other, as plain data. `wire.py` turns it into bytes and back.

A message about a transfer travels in an `Envelope` under its key; HELLO, HELLO_PROOF and PING have none.
"""

from dataclasses import dataclass

from kvrelay.connector.base import EndReason, GrantPlan, Handover, RefuseReason
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A transport that D offers, and where P finds it."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why D will not open a session, or has closed one: an error's code and message."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How each side introduces itself. `proof` and `refusal` are D's, `idle_sessions` are P's."""

    epoch: str
    nonce: bytes
    fingerprint: str
    layout: KVLayout
    quantization: str = "none"
    transfer_dtype: str = "auto"
    version: int = PROTOCOL_VERSION
    endpoints: tuple[Endpoint, ...] = ()
    proof: bytes = b""
    idle_sessions: tuple[bytes, ...] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class HelloProof:
    """P's own proof, and the transport it chose."""

    proof: bytes
    transport: str


@dataclass(frozen=True, slots=True)
class Ping:
    """The session lives."""


@dataclass(frozen=True, slots=True)
class OfferMessage:
    """P holds all blocks of this prompt."""

    num_tokens: int
    token_digest: bytes


@dataclass(frozen=True, slots=True)
class GrantMessage:
    """Write these ranges to these places."""

    grant_nonce: bytes
    plan: GrantPlan


@dataclass(frozen=True, slots=True)
class RefuseMessage:
    """D's no."""

    reason: RefuseReason
    retryable: bool


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """P's last word: every byte is written."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class Ack:
    """Landed."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """D wants the blocks back."""


@dataclass(frozen=True, slots=True)
class EndMessage:
    """P writes nothing more under this attempt."""

    reason: EndReason


TransferMessage = OfferMessage | GrantMessage | RefuseMessage | CommitMessage | Ack | Revoke | EndMessage
Body = Hello | HelloProof | Ping | TransferMessage


@dataclass(frozen=True, slots=True)
class Envelope:
    """One control message. `key` is set if and only if the body is about a transfer."""

    session_nonce: bytes
    body: Body
    key: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class GrantId:
    """The name of one grant on the data path: only bytes under a live one reach blocks."""

    session_nonce: bytes
    grant_nonce: bytes
    key: RequestKey
