"""Bytes to messages and back: the only module of the connector's control side that knows protobuf.

Every size that a peer can name is checked here, before anything is built from it. What is malformed raises
InvalidArgument, which names the field; the caller drops and counts it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvrelay.connector.base import EndReason, GrantedRange, GrantPlan, Handover, RefuseReason
from kvrelay.connector.checksum import DIGEST_BYTES
from kvrelay.connector.messages import (
    Ack,
    Body,
    CommitMessage,
    EndMessage,
    Endpoint,
    Envelope,
    GrantId,
    GrantMessage,
    Hello,
    HelloProof,
    OfferMessage,
    Ping,
    Refusal,
    RefuseMessage,
    Revoke,
)
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import MAX_CHOICES, MAX_LOGPROBS
from kvrelay.engine.request import FinishReason, Logprobs, OutputToken, RequestKey
from kvrelay.engine.secret import NONCE_BYTES
from kvrelay.proto import node_pb2, transfer_pb2 as pb

MAX_MESSAGE_BYTES = 2**21
MAX_HELLO_BYTES = 2**14  # from a peer that has no session yet
MAX_HEADER_BYTES = 512
MAX_PIECE_BYTES = 2**20
MAX_ID_BYTES = 128
MAX_TEXT_BYTES = 1024
MAX_IDLE_SESSIONS = 64
MAX_ENDPOINTS = 16
MAX_RANGES = 4096
MAX_BLOCKS = 2**18
SESSION_NONCE_BYTES = 2 * NONCE_BYTES
PROOF_BYTES = 32


def encode(envelope: Envelope) -> bytes:
    """The message's bytes."""
    message = pb.ControlMessage(session_nonce=envelope.session_nonce)
    if envelope.key is not None:
        message.request_id, message.attempt = envelope.key
    name, fill = _ENCODERS[type(envelope.body)]
    body = getattr(message, name)
    body.SetInParent()
    fill(body, envelope.body)
    return message.SerializeToString()


def decode_frames(frames: Sequence[bytes], max_bytes: int = MAX_MESSAGE_BYTES) -> Envelope:
    """Of one ZMQ message, which is one frame. Raises: InvalidArgument."""
    if len(frames) != 1:
        raise InvalidArgument("frames", len(frames), "must be 1")
    return decode(frames[0], max_bytes)


def decode(payload: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Envelope:
    """Raises: InvalidArgument for whatever is malformed or larger than allowed."""
    _at_most("message", len(payload), max_bytes)
    try:
        message = pb.ControlMessage.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument("message", payload[:16], "not a ControlMessage") from error
    _at_most("session_nonce", len(message.session_nonce), SESSION_NONCE_BYTES)
    name = message.WhichOneof("message")
    if name is None:
        raise InvalidArgument("message", "", "says nothing that this version knows")
    body = _DECODERS[name](getattr(message, name))
    if isinstance(body, (Hello, HelloProof, Ping)):
        return Envelope(message.session_nonce, body)
    return Envelope(message.session_nonce, body, _key(message))


def encode_header(grant: GrantId, offset: int, size: int) -> bytes:
    """The header of a piece: `size` bytes at `offset` of the grant's run of bytes."""
    return pb.PieceHeader(
        session_nonce=grant.session_nonce,
        grant_nonce=grant.grant_nonce,
        request_id=grant.key.request_id,
        attempt=grant.key.attempt,
        offset=offset,
        size=size,
    ).SerializeToString()


def decode_header(payload: bytes) -> tuple[GrantId, int, int]:
    """(grant, offset, size) of a piece.

    Raises: InvalidArgument.
    """
    _at_most("header", len(payload), MAX_HEADER_BYTES)
    try:
        header = pb.PieceHeader.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument("header", payload[:16], "not a PieceHeader") from error
    _at_most("size", header.size, MAX_PIECE_BYTES)
    return GrantId(header.session_nonce, header.grant_nonce, _key(header)), header.offset, header.size


# --- checks -----------------------------------------------------------------------------------------------------


def _at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidArgument(field, value, f"at most {limit}")


def _exactly(field: str, value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise InvalidArgument(field, len(value), f"must be {size} bytes")
    return value


def _name(field: str, value: str, limit: int = MAX_ID_BYTES) -> str:
    if not value or len(value) > limit:
        raise InvalidArgument(field, value, f"must have 1 to {limit} characters")
    return value


def _key(message: Any) -> RequestKey:
    return RequestKey(_name("request_id", message.request_id), message.attempt)


# --- bodies -----------------------------------------------------------------------------------------------------


def _fill_hello(message: Any, hello: Hello) -> None:
    message.protocol_version = hello.version
    message.epoch = hello.epoch
    message.nonce = hello.nonce
    message.proof = hello.proof
    message.model_fingerprint = hello.fingerprint
    message.quantization = hello.quantization
    message.kv_transfer_dtype = hello.transfer_dtype
    message.kv_layout.CopyFrom(
        node_pb2.KVLayout(
            num_layers=hello.layout.num_layers,
            num_kv_heads=hello.layout.num_kv_heads,
            head_dim=hello.layout.head_dim,
            block_size=hello.layout.block_size,
            dtype=hello.layout.dtype,
        )
    )
    message.transports.extend(pb.TransportOffer(name=e.name, address=e.address) for e in hello.endpoints)
    message.idle_sessions.extend(hello.idle_sessions)
    if hello.refusal is not None:
        message.error.code = hello.refusal.code
        message.error.message = hello.refusal.message[:MAX_TEXT_BYTES]


def _read_hello(message: Any) -> Hello:
    _at_most("transports", len(message.transports), MAX_ENDPOINTS)
    _at_most("idle_sessions", len(message.idle_sessions), MAX_IDLE_SESSIONS)
    layout = message.kv_layout
    refusal = None
    if message.HasField("error"):
        _at_most("error.message", len(message.error.message), MAX_TEXT_BYTES)
        refusal = Refusal(_name("error.code", message.error.code), message.error.message)
    return Hello(
        epoch=_name("epoch", message.epoch),
        nonce=_exactly("nonce", message.nonce, NONCE_BYTES),
        fingerprint=_name("model_fingerprint", message.model_fingerprint),
        quantization=_name("quantization", message.quantization or "none"),
        transfer_dtype=_name("kv_transfer_dtype", message.kv_transfer_dtype or "auto"),
        layout=KVLayout(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=_name("dtype", layout.dtype),
        ),
        version=message.protocol_version,
        endpoints=tuple(
            Endpoint(_name("transport", t.name), _name("address", t.address, MAX_TEXT_BYTES))
            for t in message.transports
        ),
        proof=_exactly("proof", message.proof, PROOF_BYTES) if message.proof else b"",
        idle_sessions=tuple(_exactly("idle_sessions", n, SESSION_NONCE_BYTES) for n in message.idle_sessions),
        refusal=refusal,
    )


def _fill_hello_proof(message: Any, body: HelloProof) -> None:
    message.proof, message.transport = body.proof, body.transport


def _read_hello_proof(message: Any) -> HelloProof:
    return HelloProof(_exactly("proof", message.proof, PROOF_BYTES), _name("transport", message.transport))


def _fill_offer(message: Any, body: OfferMessage) -> None:
    message.num_tokens, message.token_digest = body.num_tokens, body.token_digest


def _read_offer(message: Any) -> OfferMessage:
    return OfferMessage(message.num_tokens, _exactly("token_digest", message.token_digest, DIGEST_BYTES))


def _fill_grant(message: Any, body: GrantMessage) -> None:
    message.grant_nonce = body.grant_nonce
    message.ranges.extend(pb.TokenRange(start=r.start, end=r.end, block_ids=r.block_ids) for r in body.plan.ranges)


def _read_grant(message: Any) -> GrantMessage:
    _at_most("ranges", len(message.ranges), MAX_RANGES)
    _at_most("block_ids", sum(len(r.block_ids) for r in message.ranges), MAX_BLOCKS)
    ranges = tuple(GrantedRange(r.start, r.end, tuple(r.block_ids)) for r in message.ranges)
    return GrantMessage(_exactly("grant_nonce", message.grant_nonce, NONCE_BYTES), GrantPlan(ranges))


def _fill_refuse(message: Any, body: RefuseMessage) -> None:
    message.reason, message.retryable = body.reason, body.retryable


def _read_refuse(message: Any) -> RefuseMessage:
    known = message.reason in RefuseReason.__members__
    return RefuseMessage(RefuseReason(message.reason) if known else RefuseReason.UNKNOWN, message.retryable)


def _fill_commit(message: Any, body: CommitMessage) -> None:
    handover = body.handover
    for token in handover.first_tokens:
        said = message.first_tokens.add(
            choice=token.choice, token_id=token.token_id, finish_reason=token.finish_reason or ""
        )
        if token.logprobs is not None:
            said.logprobs.token_ids.extend(token.logprobs.token_ids)
            said.logprobs.logprobs.extend(token.logprobs.logprobs)
    message.num_cached_tokens = handover.num_cached_tokens
    message.block_digests.extend(handover.block_digests)


def _read_commit(message: Any) -> CommitMessage:
    if not message.first_tokens:
        raise InvalidArgument("first_tokens", 0, "at least one")
    _at_most("first_tokens", len(message.first_tokens), MAX_CHOICES)
    _at_most("block_digests", len(message.block_digests), MAX_BLOCKS)
    return CommitMessage(
        Handover(
            first_tokens=tuple(_first_token(t) for t in message.first_tokens),
            num_cached_tokens=message.num_cached_tokens,
            block_digests=tuple(_exactly("block_digests", d, DIGEST_BYTES) for d in message.block_digests),
        )
    )


def _first_token(message: Any) -> OutputToken:
    try:
        finish_reason = FinishReason(message.finish_reason) if message.finish_reason else None
    except ValueError:
        raise InvalidArgument("finish_reason", message.finish_reason, "not a finish reason") from None
    return OutputToken(
        choice=message.choice,
        token_id=message.token_id,
        logprobs=_read_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=finish_reason,
    )


def _read_logprobs(message: Any) -> Logprobs:
    _at_most("logprobs", len(message.token_ids), 1 + MAX_LOGPROBS)
    if len(message.token_ids) != len(message.logprobs):
        raise InvalidArgument("logprobs", len(message.logprobs), f"must be one a token id, {len(message.token_ids)}")
    return Logprobs(tuple(message.token_ids), tuple(message.logprobs))


def _fill_end(message: Any, body: EndMessage) -> None:
    message.reason = body.reason


def _read_end(message: Any) -> EndMessage:
    known = message.reason in EndReason.__members__
    return EndMessage(EndReason(message.reason) if known else EndReason.CANCELLED)


def _fill_nothing(_message: Any, _body: Body) -> None:
    pass


_ENCODERS: dict[type[Body], tuple[str, Callable[[Any, Any], None]]] = {
    Hello: ("hello", _fill_hello),
    HelloProof: ("hello_proof", _fill_hello_proof),
    Ping: ("ping", _fill_nothing),
    OfferMessage: ("offer", _fill_offer),
    GrantMessage: ("grant", _fill_grant),
    RefuseMessage: ("refuse", _fill_refuse),
    CommitMessage: ("commit", _fill_commit),
    Ack: ("ack", _fill_nothing),
    Revoke: ("revoke", _fill_nothing),
    EndMessage: ("end", _fill_end),
}
_DECODERS: dict[str, Callable[[Any], Body]] = {
    "hello": _read_hello,
    "hello_proof": _read_hello_proof,
    "ping": lambda _: Ping(),
    "offer": _read_offer,
    "grant": _read_grant,
    "refuse": _read_refuse,
    "commit": _read_commit,
    "ack": lambda _: Ack(),
    "revoke": lambda _: Revoke(),
    "end": _read_end,
}
