"""Who may open a session with whom, and the proofs for it. Pure: messages in, errors or messages out.

HELLO (P) -> HELLO (D, with its proof) -> HELLO_PROOF (P) -> PING (D): open. Each side draws a nonce; both nonces
together name the session, so that neither side can be led back into an old one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvrelay.connector.messages import PROTOCOL_VERSION, Body, Endpoint, Hello, Refusal
from kvrelay.connector.transit import Transit, agree_transit
from kvrelay.connector.transport.base import Writer
from kvrelay.engine.errors import (
    KvrelayError,
    PreconditionFailed,
    RemoteError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey
from kvrelay.engine.secret import prove, verify

PING_S = 1.0
LOST_AFTER_S = 5.0
HANDSHAKE_S = 5.0
_P, _D = "prefill", "decode"
_TRANSIENT = (Unavailable.code, ResourceExhausted.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a node says of itself, and the secret that it shares with its peers."""

    epoch: str
    fingerprint: str
    layout: KVLayout
    quantization: str = "none"
    transfer_dtype: str = "auto"
    secret: str = ""

    def hello(
        self,
        nonce: bytes,
        *,
        endpoints: tuple[Endpoint, ...] = (),
        proof: bytes = b"",
        idle_sessions: tuple[bytes, ...] = (),
        refusal: Refusal | None = None,
    ) -> Hello:
        return Hello(
            epoch=self.epoch,
            nonce=nonce,
            fingerprint=self.fingerprint,
            quantization=self.quantization,
            transfer_dtype=self.transfer_dtype,
            layout=self.layout,
            endpoints=endpoints,
            proof=proof,
            idle_sessions=idle_sessions,
            refusal=refusal,
        )


Say = Callable[[Body, RequestKey], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open session, as the sender and the receiver see it. `send` may be called from any thread."""

    peer_epoch: str
    nonce: bytes
    endpoint: Endpoint  # the transport chosen
    transit: Transit  # the form in which KV travels
    send: Say


def session_nonce(p_hello: Hello, d_hello: Hello) -> bytes:
    return p_hello.nonce + d_hello.nonce


def check_same_model(ours: Identity, theirs: Hello) -> None:
    """Raises: PreconditionFailed, naming the first field in which the two must agree and do not."""
    for field, mine, other in (
        ("protocol_version", PROTOCOL_VERSION, theirs.version),
        ("model_fingerprint", ours.fingerprint, theirs.fingerprint),
        ("quantization", ours.quantization, theirs.quantization),
    ):
        if mine != other:
            raise PreconditionFailed(f"{field} differs: {mine!r} here, {other!r} on the peer")


def check_offered(ours: Identity, p_hello: Hello) -> Transit:
    """D's check of P's HELLO, and how KV will travel between them.

    Raises: PreconditionFailed (LayoutMismatch), naming the field.
    """
    check_same_model(ours, p_hello)
    return agree_transit(p_hello.layout, ours.layout, p_hello.transfer_dtype, ours.transfer_dtype)


def prove_decode(secret: str, p_hello: Hello, d_epoch: str, d_nonce: bytes) -> bytes:
    """D's proof, in its HELLO."""
    return prove(secret, _D, *_parts(p_hello.epoch, p_hello.nonce, d_epoch, d_nonce))


def prove_prefill(secret: str, p_hello: Hello, d_hello: Hello) -> bytes:
    """P's proof, in its HELLO_PROOF."""
    return prove(secret, _P, *_parts(p_hello.epoch, p_hello.nonce, d_hello.epoch, d_hello.nonce))


def check_decode_proof(secret: str, p_hello: Hello, d_hello: Hello) -> None:
    """Raises: Unauthenticated."""
    parts = _parts(p_hello.epoch, p_hello.nonce, d_hello.epoch, d_hello.nonce)
    if not verify(secret, d_hello.proof, _D, *parts):
        raise Unauthenticated("the decode node did not prove the cluster secret")


def check_prefill_proof(secret: str, proof: bytes, p_hello: Hello, d_hello: Hello) -> None:
    """Raises: Unauthenticated."""
    parts = _parts(p_hello.epoch, p_hello.nonce, d_hello.epoch, d_hello.nonce)
    if not verify(secret, proof, _P, *parts):
        raise Unauthenticated("the prefill node did not prove the cluster secret")


def check_answer(ours: Identity, peer_epoch: str, p_hello: Hello, d_hello: Hello) -> Transit:
    """P's check of D's HELLO, and how KV will travel between them.

    Raises: PreconditionFailed (the field named), RemoteError (what D said), Unauthenticated.
    """
    check_same_model(ours, d_hello)
    transit = agree_transit(ours.layout, d_hello.layout, ours.transfer_dtype, d_hello.transfer_dtype)
    if d_hello.refusal is not None:
        raise from_refusal(d_hello.refusal)
    if d_hello.epoch != peer_epoch:
        raise PreconditionFailed(f"epoch differs: {peer_epoch!r} was meant, {d_hello.epoch!r} is there")
    check_decode_proof(ours.secret, p_hello, d_hello)
    return transit


def choose_endpoint(preferred: Iterable[Writer], offered: tuple[Endpoint, ...]) -> Endpoint:
    """The first transport of ours that D offers too, and that reaches it.

    Raises: PreconditionFailed.
    """
    names = {writer.name: writer for writer in preferred}
    by_name = {endpoint.name: endpoint for endpoint in offered}
    for name, writer in names.items():
        if name in by_name and writer.reaches(by_name[name].address):
            return by_name[name]
    raise PreconditionFailed(
        f"transports differ: {tuple(names)!r} here, {tuple(by_name)!r} on the peer, or none that is on both reaches it"
    )


def as_refusal(error: KvrelayError) -> Refusal:
    return Refusal(error.code, error.message)


def from_refusal(refusal: Refusal) -> RemoteError:
    return RemoteError(refusal.code, refusal.message, retryable=refusal.code in _TRANSIENT)


def _parts(p_epoch: str, p_nonce: bytes, d_epoch: str, d_nonce: bytes) -> tuple[bytes, ...]:
    return (p_nonce, d_nonce, p_epoch.encode(), d_epoch.encode())
