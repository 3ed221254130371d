"""Who gets a session, who does not, and what strangers can do: nothing."""

import contextlib
import logging
import os
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import zmq
from support.connector import LAYOUT, Pair, SteppedClock, wait_until
from support.raw_peer import plain_tcp, raw_decode, raw_prefill

from kvrelay.connector import wire
from kvrelay.connector.base import (
    EndReason,
    Failed,
    GrantedRange,
    GrantPlan,
    Landed,
    Offered,
    Released,
    SessionLost,
    SessionUp,
)
from kvrelay.connector.factory import make_receiver
from kvrelay.connector.messages import (
    CommitMessage,
    EndMessage,
    Envelope,
    GrantMessage,
    Hello,
    HelloProof,
    OfferMessage,
    Ping,
    RefuseMessage,
)
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey

B = LAYOUT.block_size
OTHER_LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


@pytest.fixture
def pair(caplog):
    caplog.set_level(logging.INFO)
    pair = Pair("zmq")
    yield pair
    pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


@pytest.fixture
def stepped():
    pair = Pair("zmq", clock=SteppedClock())
    yield pair
    pair.close()


def is_alive(pair, name="alive"):
    """Whether the session that the fixture opened still moves blocks."""
    pair.run(name, B, [(0, B, (1,))])
    return len(pair.p.of(SessionLost)) == len(pair.d.of(SessionLost)) == 0


# --- what must agree ---


@pytest.mark.parametrize(
    ("p", "field"),
    [
        ({"layout": OTHER_LAYOUT}, "num_kv_heads"),
        ({"fingerprint": "another"}, "model_fingerprint"),
        ({"quantization": "int8"}, "quantization"),
    ],
)
def test_nodes_that_do_not_fit_are_told_the_field_on_both_sides(p, field, caplog):
    pair = Pair("zmq", connect=False)
    pair.sender.close()
    pair.p_values |= p
    pair.p.region = pair.p.region[:, :1].repeat(pair.p_values["layout"].block_bytes, axis=1)
    pair.start_sender(connect=False)
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    lost = pair.p.wait(SessionLost)
    assert lost.reason.startswith("FAILED_PRECONDITION")
    assert field in lost.reason
    [refused] = [r for r in caplog.records if r.message == "session_refused"]
    assert field in refused.kvrelay_fields["error"]
    assert not pair.d.collect()
    pair.close()


def test_another_protocol_version_is_refused_by_name(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        hello = peer.identity.hello(b"n" * 16)
        object.__setattr__(hello, "version", 99)
        peer.say(hello, nonce=hello.nonce)
        refusal = peer.hear(Hello).body.refusal
    assert refusal.code == "FAILED_PRECONDITION"
    assert "protocol_version" in refusal.message
    assert is_alive(pair)


def test_a_decode_node_without_the_secret_gets_no_session():
    pair = Pair("zmq", connect=False, p={"secret": "theirs"})
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    assert pair.p.wait(SessionLost).reason.startswith("UNAUTHENTICATED")
    assert pair.receiver.statistics().sessions == {}
    pair.close()


def test_a_prefill_node_without_the_secret_gets_no_session(pair):
    with raw_prefill(pair.receiver.address(), secret="guessed") as peer:
        assert peer.hello().refusal is None
        peer.say(HelloProof(peer.proof, "zmq"))
        assert peer.hear(Hello).body.refusal.code == "UNAUTHENTICATED"
    assert pair.receiver.statistics().sessions == {pair.p_values["epoch"]: "zmq"}
    assert is_alive(pair)


def test_no_secret_on_both_sides_is_agreement():
    pair = Pair("zmq", secret="")
    assert is_alive(pair)
    pair.close()


def test_a_proof_is_worth_nothing_in_another_session(pair):
    with raw_prefill(pair.receiver.address()) as peer, raw_prefill(pair.receiver.address()) as thief:
        peer.hello()
        thief.identity = thief.identity.__class__(epoch="raw", fingerprint="model", layout=LAYOUT, secret="unknown")
        thief.hello()
        thief.say(HelloProof(peer.proof, "zmq"))
        assert thief.hear(Hello).body.refusal.code == "UNAUTHENTICATED"


def test_a_transport_that_was_not_offered_is_refused(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        peer.hello()
        peer.say(HelloProof(peer.proof, "carrier pigeon"))
        assert peer.hear(Hello).body.refusal.code == "FAILED_PRECONDITION"


def test_an_address_where_nobody_listens_is_dialled_again_until_somebody_does():
    pair = Pair("zmq", connect=False)
    address = pair.receiver.address()
    pair.receiver.close()
    pair.sender.connect(pair.d_values["epoch"], address)
    pair.p.wait(SessionLost)
    pair.start_receiver(control_port=int(address.rpartition(":")[2]))
    pair.p.wait(SessionUp)
    pair.run("r", B, [(0, B, (1,))])
    assert len(pair.p.of(SessionLost)) == 1, "further attempts that fail are no news"
    pair.close()


def test_an_address_that_makes_no_sense_is_a_lost_session():
    pair = Pair("zmq", connect=False)
    pair.sender.connect("nowhere", "not an address")
    assert pair.p.wait(SessionLost).reason.startswith("UNAVAILABLE")
    pair.close()


@pytest.mark.parametrize("port", ["control_port", "data_port"])
def test_an_address_that_is_taken_is_a_config_error_and_leaves_nothing_behind(port):
    region = np.zeros((4, LAYOUT.block_bytes), np.uint8)
    values = {"region": region, "layout": LAYOUT, "fingerprint": "f", "epoch": "e", "secret": "", "wake_up": int}
    with listening() as address:
        num_threads, num_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError) as refused:
            make_receiver(**values, **{port: int(address.rpartition(":")[2])})
        assert address in refused.value.message
        assert threading.active_count() == num_threads
        assert len(os.listdir("/proc/self/fd")) == num_files


# --- strangers ---


def test_bytes_that_are_no_protocol_disturb_nobody(pair):
    """E02: on both of D's sockets."""
    addresses = (pair.receiver.address(), pair.receiver._readers["zmq"].endpoint.address)
    for address in addresses:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(range(256)) * 16, b"\x00"):
            with plain_tcp(address) as connection:
                connection.sendall(garbage)
    assert is_alive(pair)


def test_a_hundred_idle_strangers_disturb_nobody(pair):
    """E02."""
    with contextlib.ExitStack() as stack:
        for address in (pair.receiver.address(), pair.receiver._readers["zmq"].endpoint.address):
            for _ in range(100):
                stack.enter_context(plain_tcp(address))
        assert is_alive(pair)


def test_malformed_messages_are_counted_and_in_a_session_end_it(pair):
    """What such a message was to say is lost: nothing may wait for it until a deadline."""
    with raw_prefill(pair.receiver.address()) as peer:
        peer.socket.send(b"\xff\xff\xff")
        peer.socket.send(b"")
        peer.socket.send_multipart([b"two", b"frames"])
        peer.socket.send(b"x" * 100_000)
        wait_until(lambda: pair.receiver.statistics().num_dropped == 4)
        peer.open()
        peer.socket.send(b"\xff")
        assert pair.d.wait(SessionLost).peer_epoch == "raw"
        assert pair.receiver.statistics().num_dropped == 5
        assert peer.hear(Hello).body.refusal.code == "UNAVAILABLE"
    assert is_alive_with_another(pair)


def is_alive_with_another(pair, allowed=()):
    """Whether the fixture's session moves blocks, whatever became of others."""
    pair.run("alive", B, [(0, B, (1,))])
    return {lost.peer_epoch for lost in pair.p.of(SessionLost)} <= set(allowed)


def test_a_message_over_the_limit_costs_its_sender_the_connection(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        peer.socket.send(b"x" * 4 * 2**20)
        assert pair.d.wait(SessionLost).peer_epoch == "raw"
    assert is_alive_with_another(pair)


def test_a_message_without_a_session_is_answered_with_a_refusal(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        peer.say(Ping(), nonce=b"n" * 32)
        assert peer.hear(Hello).body.refusal.code == "NOT_FOUND"
        peer.say(OfferMessage(4, b"d" * 16), RequestKey("r", 0), nonce=b"n" * 32)
        assert peer.hear(Hello).body.refusal.code == "NOT_FOUND"
    assert is_alive(pair)


def test_an_offer_before_the_proof_is_refused(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        peer.hello()
        peer.say(OfferMessage(4, b"d" * 16), RequestKey("r", 0))
        assert peer.hear(Hello).body.refusal.code == "NOT_FOUND"
    assert pair.receiver.statistics().states == {}


def test_a_message_with_another_sessions_nonce_changes_nothing(pair):
    key = pair.begin("r", B, [(0, B, (1,))])
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        other = pair.sender._peers[pair.d_values["epoch"]].session.nonce
        before = pair.receiver.statistics().num_dropped
        peer.say(EndMessage(EndReason.CANCELLED), key, nonce=other)
        wait_until(lambda: pair.receiver.statistics().num_dropped == before + 1)
        peer.say(EndMessage(EndReason.CANCELLED), key)  # its own nonce, another's transfer
        peer.say(OfferMessage(B, b"d" * 16), key)
        assert peer.hear(RefuseMessage).key == key
    pair.push(key, 0, B)
    pair.commit(key)
    pair.d.wait(Landed, key)
    assert not pair.p.of(SessionLost)


def test_offers_that_nobody_calls_for_are_bounded(pair):
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        for i in range(4097):
            peer.say(OfferMessage(4, b"d" * 16), RequestKey(f"r{i}", 0))
        refused = peer.hear(RefuseMessage)
        assert (refused.key.request_id, refused.body.reason) == ("r4096", "NO_ROOM")
    wait_until(lambda: not pair.receiver.statistics().states)


# --- ends ---


def test_a_new_session_of_the_same_peer_ends_the_old_one_first(pair):
    with raw_prefill(pair.receiver.address()) as first, raw_prefill(pair.receiver.address()) as second:
        first.open()
        key = RequestKey("r", 0)
        first.say(OfferMessage(B, b"d" * 16), key)
        wait_until(lambda: pair.receiver.statistics().states == {"EARLY": 1})
        second.open()
        wait_until(lambda: pair.receiver.statistics().states == {})
        pair.d.wait(SessionUp, count=3)
        ours = [e for e in pair.d.seen if getattr(e, "peer_epoch", "") == "raw"]
        assert [type(e) for e in ours] == [SessionUp, SessionLost, SessionUp]


def test_a_hello_alone_does_not_end_the_session_of_that_peer(pair):
    with raw_prefill(pair.receiver.address(), epoch=pair.p_values["epoch"]) as stranger:
        assert stranger.hello().refusal is None
        assert is_alive(pair)


def test_a_peer_that_stops_pinging_is_lost_after_five_seconds(stepped):
    with raw_prefill(stepped.receiver.address()) as peer:
        peer.open()
        for _ in range(5):
            stepped.clock.advance(1.0)
            keep_alive(stepped)
            assert "raw" in stepped.receiver.statistics().sessions
        stepped.clock.advance(1.0)
        keep_alive(stepped)
        assert stepped.d.wait(SessionLost).peer_epoch == "raw"
        assert peer.hear(Hello).body.refusal.code == "UNAVAILABLE"
    assert stepped.receiver.statistics().sessions == {stepped.p_values["epoch"]: "zmq"}


def keep_alive(pair):
    """Some transfer of no blocks, so that both ends of the fixture's session hear each other now."""
    keep_alive.count += 1
    pair.run(f"ping{keep_alive.count}", B, [])


keep_alive.count = 0


def test_a_silent_decode_node_is_lost_after_five_seconds():
    """Its connection stands, and it says nothing after the session has opened."""
    pair = Pair("zmq", clock=SteppedClock(), connect=False)
    with listening() as data_address, raw_decode() as node:
        pair.sender.connect("raw", node.address)
        node.open(data_address)
        pair.p.wait(SessionUp)
        for _ in range(5):
            pair.clock.advance(1.0)
            node.hear(Ping)
            assert pair.sender.statistics().sessions == {"raw": "zmq"}
        pair.clock.advance(1.0)
        assert pair.p.wait(SessionLost).reason == "nothing heard for 5 s"
    pair.close()


@contextlib.contextmanager
def listening():
    """A socket that takes connections, and does nothing with them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_decode_node_that_asks_for_what_cannot_be_written_is_told_the_end(pair):
    with listening() as data_address, raw_decode() as node:
        pair.sender.connect("raw", node.address)
        node.open(data_address)
        pair.p.wait(SessionUp, count=2)
        epoch, pair.d_values["epoch"] = pair.d_values["epoch"], "raw"
        key = pair.offer("r", 2 * B)
        pair.commit(key)
        pair.d_values["epoch"] = epoch
        node.hear(OfferMessage)
        node.say(GrantMessage(b"g" * 16, GrantPlan((GrantedRange(0, 8 * B, tuple(range(8))),))), key)
        assert node.hear((EndMessage, CommitMessage)).body == EndMessage(EndReason.WRITE_FAILED)
        assert pair.p.wait(Failed, key).reason == EndReason.WRITE_FAILED
        pair.p.wait(Released, key)
    assert is_alive_with_another(pair, allowed={"raw"})


def test_a_data_address_where_nobody_listens_ends_the_session_at_once():
    pair = Pair("zmq", clock=SteppedClock(), connect=False)
    with raw_decode() as node:
        pair.sender.connect("raw", node.address)
        node.open("127.0.0.1:1")
        pair.p.wait(SessionLost)
    pair.close()


def test_a_peers_end_is_seen_at_once_without_waiting_for_pings():
    """B06: no clock runs here, so it is not the lease that notices."""
    pair = Pair("zmq", clock=SteppedClock())
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        wait_until(lambda: "raw" in pair.receiver.statistics().sessions)
    wait_until(lambda: pair.clock.advance(0.01) or "raw" not in pair.receiver.statistics().sessions)
    assert pair.clock.now() < 1001.0
    pair.close()


def test_a_session_whose_messages_are_not_read_is_ended_not_thinned(pair):
    """Nothing is dropped at the high-water mark: a send that would block ends the session."""
    with raw_prefill(pair.receiver.address()) as peer:
        peer.socket.setsockopt(zmq.RCVHWM, 1)
        peer.open()
        keys = [RequestKey(f"{'x' * 100}{i}", 0) for i in range(60_000)]
        for key in keys:  # each is answered, as it ends before it is called for
            peer.socket.send(offer_bytes(peer, key))
            if "raw" not in pair.receiver.statistics().sessions:
                break
        assert pair.d.wait(SessionLost).reason == "the peer reads no messages"
    assert is_alive_with_another(pair)


def offer_bytes(peer, key):
    return wire.encode(Envelope(peer.nonce, OfferMessage(B, b"d" * 16), key))


def test_offered_follows_when_both_are_here_over_a_raw_peer(pair):
    """The raw peer of these tests speaks the protocol well enough to be granted."""
    with raw_prefill(pair.receiver.address()) as peer:
        peer.open()
        key = RequestKey("r", 0)
        pair.p_values = pair.p_values | {"epoch": "raw"}
        pair.expect("r", B, digest=b"d" * 16)
        peer.say(OfferMessage(B, b"d" * 16), key)
        pair.d.wait(Offered, key)
        pair.cancel_d(key)
        assert peer.hear(RefuseMessage).body.reason == "CANCELLED"


# --- CURVE: beyond loopback, with a secret ---

BEYOND = {"bind": "0.0.0.0", "advertise": "127.0.0.1"}


def test_beyond_loopback_with_a_secret_both_sockets_speak_curve_and_blocks_arrive():
    large = replace(LAYOUT, head_dim=10_000)  # pieces of the largest size
    pair = Pair("zmq", layout=large, **BEYOND)
    addresses = (pair.receiver.address(), pair.receiver._readers["zmq"].endpoint.address)
    assert all(address.startswith("curve://") for address in addresses)
    ranges = [(0, 3 * B, (7, 1, 4))]
    pair.check_bytes(pair.run("r", 3 * B, ranges), ranges)
    pair.close()


def test_another_secret_is_told_by_name_where_the_handshake_is_curves():
    pair = Pair("zmq", connect=False, p={"secret": "theirs"}, **BEYOND)
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    assert pair.p.wait(SessionLost).reason.startswith("UNAUTHENTICATED")
    assert not pair.d.collect()
    pair.close()


def test_no_secret_does_not_enter_where_one_is_asked_for():
    pair = Pair("zmq", connect=False, p={"secret": ""}, **BEYOND)
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    assert pair.p.wait(SessionLost).reason.startswith("UNAUTHENTICATED")
    pair.close()


def test_a_p_with_a_secret_sends_nothing_in_the_clear_beyond_loopback():
    pair = Pair("zmq", connect=False)
    pair.sender.connect(pair.d_values["epoch"], "192.0.2.1:7171")
    assert pair.p.wait(SessionLost).reason.startswith("FAILED_PRECONDITION")
    pair.close()


def test_strangers_in_the_clear_disturb_nobody_where_curve_is_spoken():
    """E02."""
    pair = Pair("zmq", **BEYOND)
    address = pair.receiver.address().removeprefix("curve://")
    with raw_prefill(address) as stranger:
        stranger.socket.setsockopt(zmq.RCVTIMEO, 100)
        stranger.say(Ping(), nonce=b"n" * 32)
        with pytest.raises(zmq.Again):
            stranger.socket.recv()
    assert is_alive(pair)
    pair.close()
