"""P's half of the connector: sessions with every D it is told of, and what the engine, D and the writers say.

Calls come on the engine thread, messages and timers on the connector's thread, and what a writer has to say on its own:
what a request waits for is served there, its ends are posted. One lock, held for bookkeeping only, orders them all.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial

import zmq

from kvrelay.connector import talking
from kvrelay.connector.base import (
    CancelOutcome,
    ConnectorStatistics,
    EndReason,
    FailReason,
    Handover,
    Offer,
    SessionLost,
    SessionUp,
    TokenRange,
    TransferEvent,
    WakeUp,
)
from kvrelay.connector.dialer import Dialer
from kvrelay.connector.events import EventQueue
from kvrelay.connector.handoff import E, S
from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import Ack, GrantId, GrantMessage, RefuseMessage, Revoke, TransferMessage
from kvrelay.connector.outgoing import DecodePeer, Outgoing, OutgoingTransfers
from kvrelay.connector.plan import PushPlan, RecastPlan
from kvrelay.connector.session import Identity, Session
from kvrelay.connector.staging import MakeWriter, StagedWriter
from kvrelay.connector.transit import Transit
from kvrelay.connector.transport.base import Region, Writer
from kvrelay.connector.wire import MAX_IDLE_SESSIONS
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import InvalidArgument, KvrelayError
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey

log = get_logger(__name__)

_DRAIN_S = 5.0  # how long `close` waits for writers
_STOP_S = 5.0
_LINGER_MS = 300
_MAX_REMEMBERED_PEERS = 1024
_MAX_STAGINGS = 8  # layouts of D's blocks that differ from ours, and transports to them


class Sender:
    """A KVSender over ZMQ control connections and the given transports, the preferred one first.

    `makers`: of each transport by name, what makes its writer over a region. `kv_digests`: blocks that are made anew
    on their way are to have digests too.
    """

    def __init__(
        self,
        identity: Identity,
        region: Region,
        makers: Mapping[str, MakeWriter],
        clock: Clock,
        wake_up: WakeUp,
        *,
        kv_digests: bool = False,
    ) -> None:
        self._identity = identity
        self._region = region
        self._makers = makers
        self._kv_digests = kv_digests
        self._writers = {name: make(region) for name, make in makers.items()}
        self._stagings: dict[tuple[str, Transit], StagedWriter] = {}  # for the Ds whose blocks are made anew
        self._packer = Loop("kv-pack", clock)
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = EventQueue(wake_up)
        self._loop = Loop("kv-sender", clock)
        self._lock = threading.RLock()  # guards everything below
        self._drained = threading.Condition(self._lock)
        self._peers: dict[str, DecodePeer] = {}
        self._idle_sessions: OrderedDict[str, deque[bytes]] = OrderedDict()  # by peer epoch: what HELLO will say
        self._transfers = OutgoingTransfers(self._loop, self._events, self._lock, self._on_closed)
        self._loop.start()

    # --- the engine's calls ---------------------------------------------------------------------------------------

    def connect(self, peer_epoch: str, address: str) -> None:
        with self._lock:
            if peer_epoch in self._peers:
                return
            dialer = Dialer(
                self._loop,
                self._clock,
                self._context,
                self._identity,
                self._writers.values(),
                peer_epoch,
                address,
                self._idle_sessions_of(peer_epoch),
                self,
            )
            self._peers[peer_epoch] = DecodePeer(dialer)
            self._loop.post(dialer.start)

    def disconnect(self, peer_epoch: str) -> None:
        with self._lock:
            peer = self._peers.pop(peer_epoch, None)
            if peer is not None:
                peer.is_leaving = True
                self._fail_all(peer)
                self._leave_if_drained(peer)

    def offer(self, offer: Offer) -> None:
        with self._lock:
            peer = self._peers.get(offer.peer_epoch)
            if peer is None or peer.session is None or peer.link is None:
                self._transfers.refuse(offer.key, FailReason.PEER_LOST)
                return
            assert peer.say is not None
            plan = self._plan(offer, peer.session.transit)
            self._transfers.add(Outgoing(offer, peer, peer.session, peer.link, peer.say, plan))

    def _plan(self, offer: Offer, transit: Transit) -> PushPlan | RecastPlan:
        if transit.is_direct:
            return PushPlan(offer.block_ids, offer.num_tokens, self._identity.layout)
        return RecastPlan(offer.block_ids, offer.num_tokens, transit, digests=self._kv_digests)

    def push(self, key: RequestKey, tokens: TokenRange, layers: range | None = None) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                transfer.plan.push(tokens, layers)
                self._transfers.write_due(transfer)

    def commit(self, key: RequestKey, handover: Handover) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                transfer.handover = handover
                self._transfers.write_due(transfer)

    def cancel(self, key: RequestKey, reason: EndReason) -> CancelOutcome:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None:
                return CancelOutcome.UNKNOWN
            transfer.is_quiet = True
            if transfer.state in (S.OFFERED, S.SENDING):
                transfer.end_reason = reason
            self._transfers.fire(transfer, E.CANCEL)
            transfer.is_quiet = False
            return CancelOutcome.FREED if transfer.state is S.CLOSED else CancelOutcome.PENDING

    def events(self) -> list[TransferEvent]:
        return self._events.take()

    def statistics(self) -> ConnectorStatistics:
        with self._lock:
            return ConnectorStatistics(
                states=self._transfers.states(),
                sessions={
                    epoch: peer.session.endpoint.name for epoch, peer in self._peers.items() if peer.session is not None
                },
                num_landed=self._transfers.num_delivered,
                num_failed=self._transfers.num_failed,
                num_bytes=self._transfers.num_bytes,
                num_dropped=sum(peer.dialer.num_malformed for peer in self._peers.values()),
                transports=self._transfers.traffic.snapshot(),
            )

    def wake(self) -> None:
        """Have the connector's thread look at its clock again (a fake one has been moved)."""
        self._loop.wake()

    def close(self) -> None:
        with self._lock:
            for transfer in self._transfers.all():
                transfer.end_reason = EndReason.SHUTDOWN
                self._transfers.fire(transfer, E.CANCEL)
            self._drained.wait_for(lambda: not self._transfers.all(), _DRAIN_S)
            for peer in {*self._peers.values(), *(transfer.peer for transfer in self._transfers.all())}:
                self._loop.post(partial(peer.dialer.close, _LINGER_MS))
            self._peers.clear()
        stopped = all([self._loop.stop(_STOP_S), self._packer.stop(_STOP_S)])
        for writer in (*self._writers.values(), *self._stagings.values()):
            writer.close()
        if stopped:
            self._context.term()
        else:
            log.error("connector_thread_stuck", extra=fields(timeout_s=_STOP_S))

    # --- sessions (DialerEvents) ----------------------------------------------------------------------------------

    def opened(self, dialer: Dialer, session: Session) -> None:
        with self._lock:
            peer = self._peers.get(session.peer_epoch)
            if peer is None or peer.dialer is not dialer:
                return
            writer = self._writer_for(session)
            if writer is None:
                self._loop.post(partial(dialer.drop, session, f"{_MAX_STAGINGS} other KV layouts are in use already"))
                return
            peer.session = session
            peer.link = writer.connect(session.nonce, session.endpoint.address, self)
            peer.say = talking.sayer(session, peer.link, partial(self._drop, dialer, session))
            peer.is_down_said = False
            self._events.put(SessionUp(session.peer_epoch))
        log.info("session_up", extra=fields(peer=session.peer_epoch, transport=session.endpoint.name))

    def _writer_for(self, session: Session) -> Writer | None:
        name, transit = session.endpoint.name, session.transit
        if transit.is_direct:
            return self._writers[name]
        if not self._stagings:
            self._packer.start()
        if (name, transit) not in self._stagings and len(self._stagings) < _MAX_STAGINGS:
            log.info("kv_conversion", extra=fields(peer=session.peer_epoch, transport=name, **transit.describe()))
            self._stagings[name, transit] = StagedWriter(self._makers[name], self._region, transit, self._packer)
        return self._stagings.get((name, transit))

    def lost(self, dialer: Dialer, session: Session, reason: str) -> None:
        log.info("session_lost", extra=fields(peer=session.peer_epoch, reason=reason))
        with self._lock:
            peer = self._peer_of(session)
            if peer is None:
                return
            peer.session = None
            self._fail_all(peer)
            if peer.link is not None:
                peer.link.close()
                peer.link = None
            if not peer.is_leaving:
                peer.is_down_said = True
                self._events.put(SessionLost(session.peer_epoch, reason))
            self._end_session_if_drained(peer, session)

    def failed(self, dialer: Dialer, error: KvrelayError) -> None:
        with self._lock:
            peer = self._peers.get(dialer.peer_epoch)
            if peer is None or peer.dialer is not dialer or (error.retryable and peer.is_down_said):
                return
            peer.is_down_said = True
            self._events.put(SessionLost(dialer.peer_epoch, f"{error.code}: {error.message}"))
        log.warning("session_failed", extra=fields(peer=dialer.peer_epoch, code=error.code, error=error.message))

    def _peer_of(self, session: Session) -> DecodePeer | None:
        peer = self._peers.get(session.peer_epoch)
        if peer is not None and peer.session is session:
            return peer
        return next((transfer.peer for transfer in self._transfers.all() if transfer.session is session), None)

    def _fail_all(self, peer: DecodePeer) -> None:
        for transfer in self._transfers.all():
            if transfer.peer is peer:
                self._transfers.fire(transfer, E.PEER_LOST, FailReason.PEER_LOST)

    def _on_closed(self, transfer: Outgoing) -> None:
        if transfer.peer.session is not transfer.session:
            self._end_session_if_drained(transfer.peer, transfer.session)
        self._leave_if_drained(transfer.peer)
        self._drained.notify_all()

    def _end_session_if_drained(self, peer: DecodePeer, session: Session) -> None:
        """A lost session is over when its writers are idle; then D may be told so, in a new one."""
        if any(transfer.session is session for transfer in self._transfers.all()):
            return
        self._remember_idle(session)
        if not peer.is_leaving:
            self._loop.post(peer.dialer.redial)

    def _leave_if_drained(self, peer: DecodePeer) -> None:
        if not peer.is_leaving or any(transfer.peer is peer for transfer in self._transfers.all()):
            return
        if peer.link is not None:
            peer.link.close()
        if peer.session is not None:
            self._remember_idle(peer.session)
        self._loop.post(partial(peer.dialer.close, _LINGER_MS))

    def _remember_idle(self, session: Session) -> None:
        nonces = self._idle_sessions_of(session.peer_epoch)
        if session.nonce not in nonces:
            nonces.append(session.nonce)

    def _idle_sessions_of(self, peer_epoch: str) -> "deque[bytes]":
        nonces = self._idle_sessions.setdefault(peer_epoch, deque(maxlen=MAX_IDLE_SESSIONS))
        self._idle_sessions.move_to_end(peer_epoch)
        if len(self._idle_sessions) > _MAX_REMEMBERED_PEERS:
            self._idle_sessions.popitem(last=False)
        return nonces

    # --- messages -------------------------------------------------------------------------------------------------

    def received(self, session: Session, key: RequestKey, body: TransferMessage) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None or transfer.session is not session:
                return
            match body:
                case GrantMessage():
                    self._take_grant(transfer, body)
                case RefuseMessage():
                    self._transfers.fire(transfer, E.REFUSE, body.reason, body.retryable)
                case Revoke():
                    self._transfers.fire(transfer, E.REVOKE, FailReason.REVOKED)
                case Ack():
                    self._transfers.fire(transfer, E.ACK)
                case _:
                    log.warning("unexpected_message", extra=fields(peer=session.peer_epoch, body=type(body).__name__))

    def _take_grant(self, transfer: Outgoing, body: GrantMessage) -> None:
        if transfer.state is not S.OFFERED:
            return
        try:
            transfer.plan.grant(body.plan)
        except InvalidArgument as error:  # P cannot write what D asks for
            log.warning("grant_malformed", extra=fields(peer=transfer.session.peer_epoch, error=error.message))
            self._transfers.fire(transfer, E.GRANT)
            self._transfers.fire(transfer, E.WRITE_FAILED, EndReason.WRITE_FAILED)
            return
        transfer.grant = GrantId(transfer.session.nonce, body.grant_nonce, transfer.key)
        self._transfers.fire(transfer, E.GRANT)

    # --- the writer (WriterEvents), on its thread -----------------------------------------------------------------

    def heard(self, session_nonce: bytes, message: bytes) -> None:
        """Served at once, on the writer's thread: so no other has to be woken for it."""
        with self._lock:
            peer = next((p for p in self._peers.values() if p.session and p.session.nonce == session_nonce), None)
            if peer is None or peer.session is None:
                return
            try:
                key, body = talking.read(session_nonce, message)
            except InvalidArgument as error:  # what it was to say is lost, and something may wait for it
                peer.dialer.num_malformed += 1
                self._drop(peer.dialer, peer.session, f"malformed message: {error.message}")
            else:
                self.received(peer.session, key, body)

    def _drop(self, dialer: Dialer, session: Session, reason: str) -> None:
        self._loop.post(partial(dialer.drop, session, reason))

    def written(self, grant: GrantId, num_bytes: int) -> None:
        """Served at once: COMMIT may have waited for it."""
        with self._lock:
            self._transfers.num_bytes += num_bytes
            transfer = self._transfers.get(grant.key)
            if transfer is not None and transfer.grant == grant:
                transfer.num_written += num_bytes
                self._transfers.traffic.add(transfer.session.endpoint.name, num_bytes=num_bytes)
                self._transfers.write_due(transfer)

    def writer_idle(self, grant: GrantId) -> None:
        self._loop.post(partial(self._on_writer_idle, grant))

    def write_failed(self, session_nonce: bytes, reason: str) -> None:
        self._loop.post(partial(self._on_write_failed, session_nonce, reason))

    def _on_writer_idle(self, grant: GrantId) -> None:
        with self._lock:
            transfer = self._transfers.get(grant.key)
            if transfer is not None and transfer.grant == grant:
                self._transfers.fire(transfer, E.WRITER_IDLE)

    def _on_write_failed(self, session_nonce: bytes, reason: str) -> None:
        """A data connection is not made anew within its session: the session ends with it."""
        with self._lock:
            for transfer in self._transfers.all():
                if transfer.session.nonce == session_nonce:
                    self._transfers.fire(transfer, E.WRITE_FAILED, EndReason.WRITE_FAILED)
            for peer in self._peers.values():
                if peer.session is not None and peer.session.nonce == session_nonce:
                    self._drop(peer.dialer, peer.session, reason)
