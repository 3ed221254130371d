"""Who fits whom, and the proofs: without sockets."""

from dataclasses import dataclass, replace

import pytest

from kvrelay.connector import session as rules
from kvrelay.connector.messages import Endpoint, Refusal
from kvrelay.connector.session import Identity
from kvrelay.engine.errors import KvrelayError, LayoutMismatch, PreconditionFailed, RemoteError, Unauthenticated
from kvrelay.engine.kv_layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=16, dtype="bfloat16")
P = Identity(epoch="p", fingerprint="f", layout=LAYOUT, secret="s")
D = Identity(epoch="d", fingerprint="f", layout=LAYOUT, secret="s")
P_HELLO = P.hello(b"p" * 16)


def answer(identity=D, nonce=b"d" * 16, hello=P_HELLO):
    proof = rules.prove_decode(identity.secret, hello, identity.epoch, nonce)
    return identity.hello(nonce, proof=proof)


def test_two_that_fit_prove_themselves_to_each_other():
    d_hello = answer()
    rules.check_answer(P, "d", P_HELLO, d_hello)
    proof = rules.prove_prefill("s", P_HELLO, d_hello)
    rules.check_prefill_proof("s", proof, P_HELLO, d_hello)
    assert rules.session_nonce(P_HELLO, d_hello) == b"p" * 16 + b"d" * 16


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "dtype"])
def test_a_layout_that_cannot_be_converted_is_refused_by_its_field(field):
    other = replace(LAYOUT, **{field: "float16" if field == "dtype" else 64})
    with pytest.raises(LayoutMismatch) as refused:
        rules.check_answer(P, "d", P_HELLO, replace(answer(), layout=other))
    assert refused.value.field == field
    with pytest.raises(LayoutMismatch) as refused:
        rules.check_offered(D, replace(P_HELLO, layout=other))
    assert refused.value.field == field


def test_both_sides_come_to_the_same_form_for_the_bytes():
    d = replace(D, layout=replace(LAYOUT, block_size=32, dtype="float32"), transfer_dtype="int8")
    transit = rules.check_answer(P, "d", P_HELLO, answer(d))
    assert transit == rules.check_offered(d, P_HELLO)
    assert (transit.source, transit.target, transit.dtype) == (P.layout, d.layout, "int8")


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"version": 2}, PreconditionFailed, "protocol_version"),
        ({"fingerprint": "g"}, PreconditionFailed, "model_fingerprint"),
        ({"quantization": "int8"}, PreconditionFailed, "quantization"),
        ({"epoch": "another"}, PreconditionFailed, "epoch"),
        ({"proof": b"x" * 32}, Unauthenticated, "secret"),
        ({"proof": b""}, Unauthenticated, "secret"),
        ({"refusal": Refusal("UNAVAILABLE", "full")}, RemoteError, "full"),
    ],
)
def test_an_answer_that_is_wrong_is_a_typed_error(changes, error, word):
    with pytest.raises(error) as refused:
        rules.check_answer(P, "d", P_HELLO, replace(answer(), **changes))
    assert word in refused.value.message
    assert refused.value.retryable == (changes.get("refusal") is not None)


@pytest.mark.parametrize(
    "proof",
    [
        rules.prove_prefill("other", P_HELLO, answer()),
        rules.prove_decode("s", P_HELLO, "d", b"d" * 16),  # D's own, reflected
        rules.prove_prefill("s", P_HELLO, answer(nonce=b"e" * 16)),  # of another session
        rules.prove_prefill("s", replace(P_HELLO, epoch="q"), answer()),  # of another node
    ],
)
def test_a_proof_of_another_talk_is_worth_nothing(proof):
    with pytest.raises(Unauthenticated):
        rules.check_prefill_proof("s", proof, P_HELLO, answer())


@dataclass(frozen=True)
class Preference:
    """Of a writer, what the choice asks for."""

    name: str
    reached: tuple[str, ...] = ("s", "z")

    def reaches(self, address):
        return address in self.reached


def test_the_first_transport_that_both_have_and_that_reaches_the_peer_is_chosen():
    offered = (Endpoint("zmq", "z"), Endpoint("shm", "s"))
    assert rules.choose_endpoint((Preference("shm"), Preference("zmq")), offered).address == "s"
    assert rules.choose_endpoint((Preference("shm", ()), Preference("zmq")), offered).address == "z"
    assert rules.choose_endpoint((Preference("inproc"), Preference("zmq")), offered).address == "z"
    for preferred in ((Preference("inproc"),), (Preference("shm", ()),)):
        with pytest.raises(KvrelayError) as refused:
            rules.choose_endpoint(preferred, offered)
        assert "transports differ" in refused.value.message
