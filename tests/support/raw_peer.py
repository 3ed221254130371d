"""Nodes that do not keep the rules: raw sockets which say what a test tells them to."""

import contextlib
import socket

import zmq
from support.connector import LAYOUT, PATIENCE_S

from kvrelay.connector import session as rules, wire
from kvrelay.connector.messages import Endpoint, Envelope, Hello, HelloProof, Ping
from kvrelay.connector.session import Identity
from kvrelay.engine.secret import new_nonce


class RawPrefill:
    """A P's control connection, by hand."""

    def __init__(self, address, *, epoch="raw", secret="s3cret", fingerprint="model", layout=LAYOUT):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.connect(f"tcp://{address}")
        self.identity = Identity(epoch=epoch, fingerprint=fingerprint, layout=layout, secret=secret)
        self.nonce = b""
        self.endpoints = {}
        self.data_sockets = []

    def say(self, body, key=None, nonce=None):
        self.socket.send(wire.encode(Envelope(self.nonce if nonce is None else nonce, body, key)))

    def hear(self, kind):
        """The next message of this kind; pings are skipped unless one is asked for."""
        while True:
            envelope = wire.decode(self.socket.recv())
            if isinstance(envelope.body, kind):
                return envelope
            assert isinstance(envelope.body, Ping), envelope

    def hello(self, **changes):
        """Say HELLO; D's answer, which may be a refusal."""
        ours = self.identity.hello(new_nonce(), **changes)
        self.say(ours, nonce=ours.nonce)
        answer = self.hear(Hello).body
        if answer.refusal is None:
            self.nonce = rules.session_nonce(ours, answer)
            self.endpoints = {endpoint.name: endpoint.address for endpoint in answer.endpoints}
            self.proof = rules.prove_prefill(self.identity.secret, ours, answer)
        return answer

    def open(self, transport="zmq", **changes):
        """Open a session."""
        answer = self.hello(**changes)
        assert answer.refusal is None, answer
        self.say(HelloProof(self.proof, transport))
        self.hear(Ping)

    def data(self, nonce=None):
        """A data connection, as this session's unless told otherwise."""
        data = self.context.socket(zmq.DEALER)
        data.setsockopt(zmq.LINGER, 0)
        self.data_sockets.append(data)
        data.setsockopt(zmq.ROUTING_ID, b"kv" + (self.nonce if nonce is None else nonce))
        data.connect(f"tcp://{self.endpoints['zmq']}")
        data.send(b"")
        return data

    def close(self):
        for socket_ in (self.socket, *self.data_sockets):
            socket_.close(0)
        self.context.term()


class RawDecode:
    """A D's control socket, by hand."""

    def __init__(self, *, epoch="raw", secret="s3cret"):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.address = f"127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.identity = Identity(epoch=epoch, fingerprint="model", layout=LAYOUT, secret=secret)
        self.peer = b""
        self.nonce = b""
        self.theirs = None

    def say(self, body, key=None, nonce=None):
        payload = wire.encode(Envelope(self.nonce if nonce is None else nonce, body, key))
        self.socket.send_multipart([self.peer, payload])

    def hear(self, kind):
        while True:
            self.peer, payload = self.socket.recv_multipart()
            envelope = wire.decode(payload)
            if isinstance(envelope.body, kind):
                return envelope

    def open(self, data_address="127.0.0.1:1"):
        """Answer a HELLO all the way to an open session."""
        self.theirs = self.hear(Hello).body
        nonce = new_nonce()
        proof = rules.prove_decode(self.identity.secret, self.theirs, self.identity.epoch, nonce)
        ours = self.identity.hello(nonce, endpoints=(Endpoint("zmq", data_address),), proof=proof)
        self.nonce = rules.session_nonce(self.theirs, ours)
        self.say(ours)
        rules.check_prefill_proof(self.identity.secret, self.hear(HelloProof).body.proof, self.theirs, ours)
        self.say(Ping())


@contextlib.contextmanager
def raw_decode(**values):
    node = RawDecode(**values)
    try:
        yield node
    finally:
        node.socket.close(0)
        node.context.term()


@contextlib.contextmanager
def raw_prefill(address, **values):
    peer = RawPrefill(address, **values)
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def plain_tcp(address):
    """A TCP connection that speaks no ZMTP."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection
