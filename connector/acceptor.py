"""D's end of the control connections: one bound socket, one session for each P that has proved itself.

Strangers may connect, stay silent or send anything: nothing is kept for them beyond a bounded number of unanswered
HELLOs, each for a few seconds. All callbacks come on the loop's thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import zmq

from kvrelay.connector import curve, session as rules, wire
from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Body, Endpoint, Envelope, Hello, HelloProof, Ping, TransferMessage
from kvrelay.connector.session import HANDSHAKE_S, LOST_AFTER_S, PING_S, Identity, Session
from kvrelay.connector.sockets import Monitored, Prober, Sent, join_address, listen, send_to
from kvrelay.connector.transit import Transit
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import InvalidArgument, KvrelayError, NotFound, PreconditionFailed, Unavailable
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey
from kvrelay.engine.secret import new_nonce

log = get_logger(__name__)

_MAX_QUEUED = 4096  # control messages, per peer and direction
_MAX_READS = 256  # messages handled before other sockets have their turn
_MAX_HALF_OPEN = 256
_MAX_SESSIONS = 1024


class AcceptorEvents(Protocol):
    """What the receiver hears."""

    def opened(self, session: Session, idle_sessions: tuple[bytes, ...]) -> None:
        """`idle_sessions`: past sessions on which this P can write no more."""

    def received(self, session: Session, key: RequestKey, body: TransferMessage) -> None: ...

    def lost(self, session: Session, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Peer:
    """One connection on which a HELLO came."""

    theirs: Hello
    ours: Hello
    nonce: bytes
    transit: Transit
    heard_at: float
    session: Session | None = None


class Acceptor:
    """The control socket. Methods but `address` and `close_session` are for the loop's thread only."""

    def __init__(
        self,
        loop: Loop,
        clock: Clock,
        context: "zmq.Context[zmq.Socket[bytes]]",
        identity: Identity,
        endpoints: Callable[[], tuple[Endpoint, ...]],
        bind: str,
        port: int,
        advertise: str,
        events: AcceptorEvents,
    ) -> None:
        self.num_malformed = 0
        self._loop = loop
        self._clock = clock
        self._identity = identity
        self._endpoints = endpoints
        self._events = events
        self._peers: dict[bytes, _Peer] = {}  # by the connection's routing id
        self._tick_timer: Timer | None = None
        is_curve = curve.is_due(identity.secret, bind, advertise or bind)
        self._socket, bound_port = listen(
            context,
            bind,
            port,
            max_queued=_MAX_QUEUED,
            max_bytes=wire.MAX_MESSAGE_BYTES,
            curve_secret=identity.secret if is_curve else "",
        )
        self.address = (curve.SCHEME if is_curve else "") + join_address(advertise or bind, bound_port)
        self._connection: Monitored | None = None
        self._prober = Prober(loop, self._probe)

    def start(self) -> None:
        self._connection = Monitored(self._loop, self._socket, self._prober.start)
        self._connection.watch(zmq.POLLIN, self._read)

    def close(self, linger_ms: int = 0) -> None:
        """Let go of all peers; what is queued for them may still go out for `linger_ms`."""
        self._prober.stop()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if self._connection is not None:
            self._connection.close(linger_ms)
            self._connection = None
        self._peers.clear()

    def close_session(self, session: Session, reason: str) -> None:
        """End one session, and tell P. `lost` follows."""
        self._loop.post(partial(self._close_session, session, reason))

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            peer = self._peers.get(routing_id)
            known = peer is not None and peer.session is not None
            try:
                envelope = wire.decode_frames(frames, wire.MAX_MESSAGE_BYTES if known else wire.MAX_HELLO_BYTES)
            except InvalidArgument as error:
                self.num_malformed += 1
                if known:  # what it was to say is lost, and something may wait for it
                    self._refuse(routing_id, Unavailable(f"malformed message: {error.message}"))
                continue
            try:
                self._take(routing_id, peer, envelope)
            except InvalidArgument as error:
                self.num_malformed += 1
                log.debug("control_message_dropped", extra=fields(error=error.message))
            except KvrelayError as error:
                self._refuse(routing_id, error)

    def _take(self, routing_id: bytes, peer: _Peer | None, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, Hello):
            if peer is not None:
                raise InvalidArgument("hello", body.epoch, "was said before on this connection")
            self._take_hello(routing_id, body)
            return
        if peer is None:
            raise NotFound("no session on this connection")
        if envelope.session_nonce != peer.nonce:
            raise InvalidArgument("session_nonce", envelope.session_nonce, "is not this session's")
        peer.heard_at = self._clock.now()
        if isinstance(body, HelloProof):
            if peer.session is None:
                self._take_proof(routing_id, peer, body)
        elif not isinstance(body, Ping) and envelope.key is not None:
            if peer.session is None:
                raise NotFound("the session is not open: HELLO_PROOF has not come")
            self._events.received(peer.session, envelope.key, body)

    def _take_hello(self, routing_id: bytes, theirs: Hello) -> None:
        transit = rules.check_offered(self._identity, theirs)
        if sum(peer.session is None for peer in self._peers.values()) >= _MAX_HALF_OPEN:
            raise Unavailable("too many connections are being opened")
        nonce = new_nonce()
        ours = self._identity.hello(
            nonce,
            endpoints=self._endpoints(),
            proof=rules.prove_decode(self._identity.secret, theirs, self._identity.epoch, nonce),
        )
        peer = _Peer(theirs, ours, rules.session_nonce(theirs, ours), transit, self._clock.now())
        self._peers[routing_id] = peer
        self._send(routing_id, Envelope(peer.nonce, ours))
        if self._tick_timer is None:
            self._tick_timer = self._loop.call_in(PING_S, self._tick)

    def _take_proof(self, routing_id: bytes, peer: _Peer, body: HelloProof) -> None:
        rules.check_prefill_proof(self._identity.secret, body.proof, peer.theirs, peer.ours)
        endpoints = [endpoint for endpoint in peer.ours.endpoints if endpoint.name == body.transport]
        if not endpoints:
            raise PreconditionFailed(f"transport {body.transport!r} was not offered")
        if sum(other.session is not None for other in self._peers.values()) >= _MAX_SESSIONS:
            raise Unavailable(f"{_MAX_SESSIONS} sessions are open already")
        for other_id, other in list(self._peers.items()):
            if other.session is not None and other.theirs.epoch == peer.theirs.epoch:
                self._lose(other_id, "replaced by a new session of the same peer")
        nonce = peer.nonce

        def send(message: Body, key: RequestKey) -> None:
            self._loop.post(partial(self._send_in, routing_id, nonce, Envelope(nonce, message, key)))

        peer.session = Session(
            peer_epoch=peer.theirs.epoch, nonce=nonce, endpoint=endpoints[0], transit=peer.transit, send=send
        )
        self._events.opened(peer.session, peer.theirs.idle_sessions)
        self._send(routing_id, Envelope(nonce, Ping()))

    # --- sending ---------------------------------------------------------------------------------------------------

    def _send_in(self, routing_id: bytes, nonce: bytes, envelope: Envelope) -> None:
        peer = self._peers.get(routing_id)
        if peer is not None and peer.session is not None and peer.nonce == nonce:
            self._send(routing_id, envelope)

    def _send(self, routing_id: bytes, envelope: Envelope) -> None:
        sent = send_to(self._socket, routing_id, wire.encode(envelope))
        if sent is not Sent.QUEUED:  # nothing may be dropped: the session is over
            self._lose(routing_id, "the connection ended" if sent is Sent.GONE else "the peer reads no messages")

    def _refuse(self, routing_id: bytes, error: KvrelayError) -> None:
        """Answer with the error; whatever was half open on that connection is forgotten."""
        peer = self._peers.get(routing_id)
        epoch = "" if peer is None else peer.theirs.epoch
        level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING  # strangers must not fill the log
        log.log(level, "session_refused", extra=fields(peer=epoch, code=error.code, error=error.message))
        self._say_refusal(routing_id, error)
        if peer is not None:
            self._lose(routing_id, error.message)

    def _say_refusal(self, routing_id: bytes, error: KvrelayError) -> None:
        hello = self._identity.hello(new_nonce(), refusal=rules.as_refusal(error))
        send_to(self._socket, routing_id, wire.encode(Envelope(hello.nonce, hello)))

    # --- ends ------------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Some connection has ended: find out which by a ping to all, after what came before the end."""
        self._read()
        for routing_id, peer in list(self._peers.items()):
            if peer.session is not None:  # to one that is half open, a ping would say that it is open
                self._send(routing_id, Envelope(peer.nonce, Ping()))

    def _tick(self) -> None:
        now = self._clock.now()
        for routing_id, peer in list(self._peers.items()):
            limit_s = HANDSHAKE_S if peer.session is None else LOST_AFTER_S
            if now - peer.heard_at > limit_s:
                self._say_refusal(routing_id, Unavailable(f"nothing heard for {limit_s:g} s"))
                self._lose(routing_id, f"nothing heard for {limit_s:g} s")
            elif peer.session is not None:
                self._send(routing_id, Envelope(peer.nonce, Ping()))
        self._tick_timer = self._loop.call_in(PING_S, self._tick) if self._peers else None

    def _close_session(self, session: Session, reason: str) -> None:
        for routing_id, peer in list(self._peers.items()):
            if peer.session is session:
                self._say_refusal(routing_id, Unavailable(reason))
                self._lose(routing_id, reason)

    def _lose(self, routing_id: bytes, reason: str) -> None:
        peer = self._peers.pop(routing_id, None)
        if peer is not None and peer.session is not None:
            self._events.lost(peer.session, reason)
