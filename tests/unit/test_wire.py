"""Control messages and piece headers, as bytes and back; and what is refused before anything is built from it."""

import pytest

from kvrelay.connector import wire
from kvrelay.connector.base import EndReason, GrantedRange, GrantPlan, Handover, RefuseReason
from kvrelay.connector.messages import (
    Ack,
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
from kvrelay.engine.request import FinishReason, Logprobs, OutputToken, RequestKey
from kvrelay.proto import inference_pb2, transfer_pb2 as pb

KEY = RequestKey("r", 3)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=16, dtype="bfloat16")
HELLO = Hello(
    epoch="e",
    nonce=b"n" * 16,
    fingerprint="f",
    layout=LAYOUT,
    quantization="int8",
    endpoints=(Endpoint("zmq", "127.0.0.1:5"),),
    proof=b"p" * 32,
    idle_sessions=(b"s" * 32,),
    refusal=Refusal("UNAVAILABLE", "later"),
)
BODIES = [
    HELLO,
    HelloProof(b"p" * 32, "zmq"),
    Ping(),
    OfferMessage(17, b"d" * 16),
    GrantMessage(b"g" * 16, GrantPlan((GrantedRange(16, 33, (4, 0)), GrantedRange(48, 64, (9,))))),
    GrantMessage(b"g" * 16, GrantPlan(())),
    *[RefuseMessage(reason, retryable=True) for reason in RefuseReason],
    CommitMessage(
        Handover(
            first_tokens=(
                OutputToken(choice=0, token_id=7),
                OutputToken(
                    choice=1, token_id=8, logprobs=Logprobs((8, 3), (-0.5, -0.25)), finish_reason=FinishReason.STOP
                ),
            ),
            num_cached_tokens=16,
            block_digests=(b"b" * 16, b"c" * 16),
        )
    ),
    Ack(),
    Revoke(),
    *[EndMessage(reason) for reason in EndReason],
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_comes_back_as_it_was(body):
    key = None if isinstance(body, (Hello, HelloProof, Ping)) else KEY
    envelope = Envelope(b"s" * 32, body, key)
    assert wire.decode(wire.encode(envelope)) == envelope


def test_a_piece_header_comes_back_as_it_was():
    grant = GrantId(b"s" * 32, b"g" * 16, KEY)
    assert wire.decode_header(wire.encode_header(grant, 2**40, 2**20)) == (grant, 2**40, 2**20)


def message(**fields):
    return pb.ControlMessage(**({"session_nonce": b"s" * 32, "request_id": "r"} | fields)).SerializeToString()


def hello(**fields):
    layout = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, "dtype": "float32"}
    known = {"epoch": "e", "nonce": b"n" * 16, "model_fingerprint": "f", "kv_layout": layout}
    return message(hello=pb.Hello(**(known | fields)))


def first_token(**logprobs):
    token = pb.FirstToken(logprobs=inference_pb2.Logprobs(**logprobs))
    return message(commit=pb.Commit(first_tokens=[token]))


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"\xff", "message"),
        (b"", "message"),
        (message(), "message"),
        (b"x" * (wire.MAX_MESSAGE_BYTES + 1), "message"),
        (message(session_nonce=b"s" * 33, ping=pb.Ping()), "session_nonce"),
        (message(request_id="", ack=pb.Ack()), "request_id"),
        (message(request_id="r" * 129, ack=pb.Ack()), "request_id"),
        (message(offer=pb.Offer(num_tokens=1, token_digest=b"short")), "token_digest"),
        (message(grant=pb.Grant(grant_nonce=b"short")), "grant_nonce"),
        (message(grant=pb.Grant(grant_nonce=b"g" * 16, ranges=[pb.TokenRange()] * 4097)), "ranges"),
        (message(grant=pb.Grant(ranges=[pb.TokenRange(block_ids=range(2**18 + 1))])), "block_ids"),
        (message(commit=pb.Commit()), "first_tokens"),
        (message(commit=pb.Commit(first_tokens=[pb.FirstToken()] * 129)), "first_tokens"),
        (message(commit=pb.Commit(first_tokens=[pb.FirstToken(finish_reason="bored")])), "finish_reason"),
        (message(commit=pb.Commit(first_tokens=[pb.FirstToken()], block_digests=[b"1"])), "block_digests"),
        (first_token(token_ids=range(66), logprobs=[0.0] * 66), "logprobs"),
        (first_token(token_ids=[1, 2], logprobs=[0.0]), "logprobs"),
        (message(hello_proof=pb.HelloProof(proof=b"short", transport="zmq")), "proof"),
        (message(hello_proof=pb.HelloProof(proof=b"p" * 32)), "transport"),
        (hello(epoch=""), "epoch"),
        (hello(nonce=b"short"), "nonce"),
        (hello(model_fingerprint=""), "model_fingerprint"),
        (hello(quantization="q" * 129), "quantization"),
        (hello(idle_sessions=[b"s" * 32] * 65), "idle_sessions"),
        (hello(idle_sessions=[b"short"]), "idle_sessions"),
        (hello(transports=[pb.TransportOffer(name="n", address="a")] * 17), "transports"),
        (hello(transports=[pb.TransportOffer(name="n")]), "address"),
        (hello(proof=b"short"), "proof"),
        (hello(error={"code": "X", "message": "m" * 1025}), "error.message"),
    ],
)
def test_what_is_malformed_or_too_large_is_refused_by_the_name_of_its_field(payload, field):
    with pytest.raises(InvalidArgument) as refused:
        wire.decode(payload)
    assert refused.value.field == field


def test_a_message_larger_than_its_sender_may_say_is_refused():
    with pytest.raises(InvalidArgument):
        wire.decode(hello(epoch="e" * 100), max_bytes=64)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff",
        b"x" * (wire.MAX_HEADER_BYTES + 1),
        pb.PieceHeader(request_id="").SerializeToString(),
        pb.PieceHeader(request_id="r", size=2**20 + 1).SerializeToString(),
    ],
)
def test_a_malformed_header_is_refused(payload):
    with pytest.raises(InvalidArgument):
        wire.decode_header(payload)


def test_a_word_of_a_later_version_still_ends_the_transfer():
    refuse = message(refuse=pb.Refuse(reason="MOON_PHASE", retryable=True))
    assert wire.decode(refuse).body == RefuseMessage(RefuseReason.UNKNOWN, retryable=True)
    assert wire.decode(message(end=pb.End(reason="MOON_PHASE"))).body == EndMessage(EndReason.CANCELLED)
