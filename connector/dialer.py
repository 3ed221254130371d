"""P's end of the control connections: one session with one D, made anew after each loss.

A lost session is never continued: each attempt has its own socket, nonce and HELLO. After a loss the next attempt
waits for `redial`, which the sender calls when its writers on the old session are idle, so that HELLO can say so.
All callbacks come on the loop's thread.
"""

from collections import deque
from collections.abc import Collection
from functools import partial
from typing import Protocol

import zmq

from kvrelay.connector import curve, session as rules, wire
from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Body, Endpoint, Envelope, Hello, HelloProof, Ping, TransferMessage
from kvrelay.connector.session import HANDSHAKE_S, LOST_AFTER_S, PING_S, Identity, Session
from kvrelay.connector.sockets import Monitored, dealer
from kvrelay.connector.transit import Transit
from kvrelay.connector.transport.base import Writer
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import InvalidArgument, KvrelayError, Unauthenticated, Unavailable
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey
from kvrelay.engine.secret import new_nonce

log = get_logger(__name__)

_MAX_QUEUED = 4096  # control messages, per direction
_MAX_READS = 256  # messages handled before other sockets have their turn
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class DialerEvents(Protocol):
    """What the sender hears."""

    def opened(self, dialer: "Dialer", session: Session) -> None: ...

    def received(self, session: Session, key: RequestKey, body: TransferMessage) -> None: ...

    def lost(self, dialer: "Dialer", session: Session, reason: str) -> None:
        """An open session is over. `redial` brings the next one."""

    def failed(self, dialer: "Dialer", error: KvrelayError) -> None:
        """An attempt failed. Unless the error is retryable, there is no other."""


class Dialer:
    """The session with one D, from `start` to `close`. Its methods are for the loop's thread only."""

    def __init__(
        self,
        loop: Loop,
        clock: Clock,
        context: "zmq.Context[zmq.Socket[bytes]]",
        identity: Identity,
        writers: Collection[Writer],
        peer_epoch: str,
        address: str,
        idle_sessions: "deque[bytes]",
        events: DialerEvents,
    ) -> None:
        self.peer_epoch = peer_epoch
        self.num_malformed = 0
        self._loop = loop
        self._clock = clock
        self._context = context
        self._identity = identity
        self._writers = writers
        self._address = address
        self._is_curve = address.startswith(curve.SCHEME)
        self._events = events
        self._idle_sessions = idle_sessions  # shared with the sender, which appends to it
        self._connection: Monitored | None = None
        self._timer: Timer | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._hello: Hello | None = None  # ours, of this attempt
        self._pending: Session | None = None  # proved, not yet open
        self._session: Session | None = None
        self._heard_at = 0.0
        self._closed = False

    def start(self) -> None:
        """Make the first attempt."""
        self._dial()

    def redial(self) -> None:
        """The writers of all past sessions are idle: connect again, soon."""
        if not self._closed and self._connection is None and self._timer is None:
            self._retry()

    def drop(self, session: Session, reason: str) -> None:
        """End this session, if it is still the current one. `lost` follows."""
        if self._session is session:
            self._end(reason)

    def close(self, linger_ms: int = 0) -> None:
        """End the session without a word, and make no other."""
        self._closed = True
        self._hang_up(linger_ms)

    # --- an attempt ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        self._timer = None
        self._hello = self._identity.hello(new_nonce(), idle_sessions=tuple(self._idle_sessions))
        socket = dealer(self._context, max_queued=_MAX_QUEUED, max_bytes=wire.MAX_MESSAGE_BYTES)
        self._connection = Monitored(self._loop, socket, self._connection_ended)
        try:
            address = curve.prepare(socket, self._identity.secret, self._address)
        except KvrelayError as error:
            self._fail(error)
            return
        self._connection.watch(zmq.POLLOUT, self._connected)
        if wrong := self._connection.connect(address):
            self._fail(Unavailable(wrong))
            return
        self._timer = self._loop.call_in(
            HANDSHAKE_S, lambda: self._fail(Unavailable(f"{self._address}: no answer for {HANDSHAKE_S:g} s"))
        )

    def _connected(self) -> None:
        assert self._connection is not None
        assert self._hello is not None
        self._connection.watch(zmq.POLLIN, self._read)
        self._send(Envelope(self._hello.nonce, self._hello))

    def _connection_ended(self) -> None:
        self._read()  # what came before the end counts
        if self._connection is not None and self._connection.has_failed_handshake and self._is_curve:
            self._fail(Unauthenticated(f"{self._address}: the handshake failed: the cluster secrets differ"))
            return
        self._end("the connection ended")

    def _end(self, reason: str) -> None:
        if self._connection is None:
            return
        if self._session is None:
            self._fail(Unavailable(f"{self._address}: {reason}"))
            return
        session = self._session
        self._hang_up()
        self._events.lost(self, session, reason)

    def _fail(self, error: KvrelayError) -> None:
        self._hang_up()
        if error.retryable:
            self._retry()
        self._events.failed(self, error)

    def _retry(self) -> None:
        self._timer = self._loop.call_in(self._backoff_s, self._dial)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _hang_up(self, linger_ms: int = 0) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None:
            self._connection.close(linger_ms)
        self._connection = self._pending = self._session = self._hello = None

    # --- messages ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            if self._connection is None:
                return
            try:
                frames = self._connection.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._heard_at = self._clock.now()
            try:
                envelope = wire.decode_frames(frames)
            except InvalidArgument as error:  # what it was to say is lost, and something may wait for it
                self.num_malformed += 1
                self._end(f"malformed message: {error.message}")
                return
            try:
                self._take(envelope)
            except InvalidArgument as error:
                self.num_malformed += 1
                log.warning("control_message_dropped", extra=fields(peer=self.peer_epoch, error=error.message))
            except KvrelayError as error:
                self._fail(error)

    def _take(self, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, Hello):
            self._take_hello(body)
        elif self._session is not None and envelope.session_nonce == self._session.nonce:
            if envelope.key is not None:
                assert not isinstance(body, (HelloProof, Ping))
                self._events.received(self._session, envelope.key, body)
        elif self._pending is not None and isinstance(body, Ping) and envelope.session_nonce == self._pending.nonce:
            self._open(self._pending)
        else:
            raise InvalidArgument("session_nonce", envelope.session_nonce, "is of no session here")

    def _take_hello(self, theirs: Hello) -> None:
        """D's answer; or, later, its word that the session is over on its side."""
        assert self._hello is not None
        if self._session is not None or self._pending is not None:
            if theirs.refusal is None:
                raise InvalidArgument("hello", theirs.epoch, "was said before")
            error = rules.from_refusal(theirs.refusal)
            if self._session is None:
                raise error
            self._end(error.message)
            return
        transit = rules.check_answer(self._identity, self.peer_epoch, self._hello, theirs)
        endpoint = rules.choose_endpoint(self._writers, theirs.endpoints)
        nonce = rules.session_nonce(self._hello, theirs)
        self._pending = self._new_session(nonce, endpoint, transit)
        proof = rules.prove_prefill(self._identity.secret, self._hello, theirs)
        self._send(Envelope(nonce, HelloProof(proof, endpoint.name)))

    def _new_session(self, nonce: bytes, endpoint: Endpoint, transit: Transit) -> Session:
        def send(body: Body, key: RequestKey) -> None:
            self._loop.post(partial(self._send_in, nonce, Envelope(nonce, body, key)))

        return Session(peer_epoch=self.peer_epoch, nonce=nonce, endpoint=endpoint, transit=transit, send=send)

    def _open(self, session: Session) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = self._loop.call_in(PING_S, self._tick)
        self._pending, self._session = None, session
        self._backoff_s = _FIRST_BACKOFF_S
        self._idle_sessions.clear()
        self._events.opened(self, session)

    def _tick(self) -> None:
        session = self._session
        assert session is not None
        if self._clock.now() - self._heard_at > LOST_AFTER_S:
            self._end(f"nothing heard for {LOST_AFTER_S:g} s")
            return
        self._timer = self._loop.call_in(PING_S, self._tick)
        self._send(Envelope(session.nonce, Ping()))

    def _send_in(self, nonce: bytes, envelope: Envelope) -> None:
        if self._session is not None and self._session.nonce == nonce:
            self._send(envelope)

    def _send(self, envelope: Envelope) -> None:
        assert self._connection is not None
        try:
            self._connection.socket.send(wire.encode(envelope), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN: nothing may be dropped, so the session is over
            self._end(f"cannot send: {error}")
