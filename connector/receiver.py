"""D's half of the connector: sessions with every P that dials in, and what the engine, P and the readers say.

Calls come on the engine thread, messages and timers on the connector's thread, and what a reader has to say on its own:
what a request waits for is served there, its ends are posted. One lock, held for bookkeeping only, orders them all.
"""

import threading
from collections.abc import Sequence
from functools import partial

import zmq

from kvrelay.connector import talking
from kvrelay.connector.acceptor import Acceptor
from kvrelay.connector.base import (
    CancelOutcome,
    ConnectorStatistics,
    Expectation,
    FailReason,
    GrantPlan,
    Handover,
    Offered,
    RefuseReason,
    Released,
    SessionLost,
    SessionUp,
    TransferEvent,
    WakeUp,
)
from kvrelay.connector.events import EventQueue
from kvrelay.connector.finisher import Finisher
from kvrelay.connector.handoff import E, R, receiver_table
from kvrelay.connector.incoming import Incoming, IncomingTransfers, PrefillPeer
from kvrelay.connector.loop import Loop
from kvrelay.connector.messages import (
    CommitMessage,
    EndMessage,
    Endpoint,
    GrantId,
    OfferMessage,
    TransferMessage,
)
from kvrelay.connector.plan import check_plan, plan_block_ids
from kvrelay.connector.session import Identity, Session
from kvrelay.connector.transport.base import Reader, Region
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ConfigError, InvalidArgument
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey
from kvrelay.engine.secret import new_nonce

log = get_logger(__name__)

EARLY_S = 5.0  # how long an offer is kept that nobody has called for
_MAX_EARLY = 4096  # offers of one peer that nobody has called for
_DRAIN_S = 5.0  # how long `close` waits for writers and readers to leave the blocks
_STOP_S = 5.0
_LINGER_MS = 300


class Receiver:
    """A KVReceiver over a ZMQ control socket and the given transports.

    Raises: ConfigError if the control socket's address cannot be bound; the readers are closed then.
    """

    def __init__(
        self,
        identity: Identity,
        region: Region,
        readers: Sequence[Reader],
        clock: Clock,
        wake_up: WakeUp,
        *,
        bind: str,
        port: int,
        advertise: str,
    ) -> None:
        self._identity = identity
        self._region = region
        self._readers = {reader.endpoint.name: reader for reader in readers}
        self._clock = clock
        self._events = EventQueue(wake_up)
        self._loop = Loop("kv-receiver", clock)
        self._lock = threading.RLock()  # guards the next three, and what they hold
        self._drained = threading.Condition(self._lock)
        self._peers: dict[str, PrefillPeer] = {}
        self._transfers = IncomingTransfers(self._loop, clock, self._events, self._lock, self._drained.notify_all)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._finisher = Finisher(region, identity.layout.block_size, clock, self._loop)
        try:
            self._acceptor = Acceptor(
                self._loop, clock, self._context, identity, self._endpoints, bind, port, advertise, self
            )
        except ConfigError:
            self._stop_threads()
            raise
        for reader in readers:
            reader.start(self)
        self._finisher.start()
        self._loop.start()
        self._loop.post(self._acceptor.start)

    # --- the engine's calls ------------------------------------------------------------------------------------------

    def expect(self, expectation: Expectation) -> None:
        key = expectation.key
        with self._lock:
            peer = self._peers.get(expectation.peer_epoch)
            if peer is None:
                self._transfers.report_failed(key, FailReason.PEER_LOST)
                return
            transfer = self._transfers.get(key)
            if transfer is not None and transfer.state is R.EARLY and transfer.peer is not peer:
                self._transfers.fire(transfer, E.TIMEOUT, RefuseReason.UNKNOWN)  # another P's
                transfer = None
            if transfer is None:
                transfer = self._transfers.add(key, peer)
            elif transfer.expectation is not None:
                return
            transfer.expectation = expectation
            self._transfers.fire(transfer, E.CALL)
            if transfer.state is R.PENDING:
                self._match(transfer)
            if transfer.state in (R.WAITING, R.PENDING):
                self._transfers.set_timer(transfer, expectation.deadline)

    def grant(self, key: RequestKey, plan: GrantPlan) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None or transfer.state is not R.PENDING:
                self._events.put(Released(key))
                return
            assert transfer.expectation is not None
            check_plan(plan, transfer.expectation.num_tokens, self._identity.layout.block_size)
            assert all(0 <= block_id < self._region.shape[0] for block_id in plan_block_ids(plan))
            transfer.plan = plan
            transfer.grant = GrantId(transfer.peer.session.nonce, new_nonce(), key)
            transfer.granted_at = self._clock.now()
            transfer.are_bytes_in = not plan.ranges
            self._transfers.fire(transfer, E.ADMIT)

    def refuse(self, key: RequestKey, reason: RefuseReason) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None and transfer.state is R.PENDING:
                self._transfers.fire(transfer, E.CANCEL, reason)

    def cancel(self, key: RequestKey) -> CancelOutcome:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None or transfer.expectation is None:
                return CancelOutcome.UNKNOWN
            transfer.is_quiet = True
            self._transfers.fire(transfer, E.CANCEL, RefuseReason.CANCELLED)
            transfer.is_quiet = False
            if transfer.state is not R.CLOSED:
                return CancelOutcome.PENDING
            self._events.discard(Offered(key))
            return CancelOutcome.FREED

    def events(self) -> list[TransferEvent]:
        return self._events.take()

    def describe(self) -> KVLayout:
        return self._identity.layout

    def address(self) -> str:
        return self._acceptor.address

    def statistics(self) -> ConnectorStatistics:
        with self._lock:
            return ConnectorStatistics(
                states=self._transfers.states(),
                sessions={epoch: peer.session.endpoint.name for epoch, peer in self._peers.items()},
                num_landed=self._transfers.num_landed,
                num_failed=self._transfers.num_failed,
                num_bytes=self._transfers.num_bytes,
                num_quarantined_blocks=self._transfers.num_quarantined_blocks(),
                num_dropped=self._acceptor.num_malformed + sum(r.num_dropped for r in self._readers.values()),
                transports=self._transfers.traffic.snapshot(),
            )

    def wake(self) -> None:
        """Have the connector's thread look at its clock again (a fake one has been moved)."""
        self._loop.wake()

    def close(self) -> None:
        with self._lock:
            for transfer in self._transfers.all():
                event = E.TIMEOUT if transfer.state is R.EARLY else E.CANCEL
                self._transfers.fire(transfer, event, RefuseReason.SHUTDOWN)
            self._drained.wait_for(self._has_drained, _DRAIN_S)
            self._loop.post(partial(self._acceptor.close, _LINGER_MS))
        self._stop_threads()

    def _stop_threads(self) -> None:
        for reader in self._readers.values():  # no reader touches a block after this
            reader.close()
        if self._loop.stop(_STOP_S) and self._finisher.stop(_STOP_S):
            self._context.term()
        else:
            log.error("connector_thread_stuck", extra=fields(timeout_s=_STOP_S))

    def _has_drained(self) -> bool:
        """Whether every P that was told to stop has answered, and the readers have left every block."""
        return not any(transfer.state in (R.REVOKED, R.STOPPING) for transfer in self._transfers.all())

    # --- sessions (AcceptorEvents) -----------------------------------------------------------------------------------

    def opened(self, session: Session, idle_sessions: tuple[bytes, ...]) -> None:
        log.info("session_up", extra=fields(peer=session.peer_epoch, transport=session.endpoint.name))
        with self._lock:
            for nonce in idle_sessions:
                self._fence(nonce, session.peer_epoch)
            reader = self._readers[session.endpoint.name]
            reader.begin_session(session.nonce)
            say = talking.sayer(session, reader, partial(self._acceptor.close_session, session))
            self._peers[session.peer_epoch] = PrefillPeer(session, say, reader, receiver_table(reader.one_sided))
            self._events.put(SessionUp(session.peer_epoch))

    def lost(self, session: Session, reason: str) -> None:
        log.info("session_lost", extra=fields(peer=session.peer_epoch, reason=reason))
        with self._lock:
            peer = self._peers.pop(session.peer_epoch)
            for transfer in self._transfers.all():
                if transfer.peer is peer:
                    self._transfers.fire(transfer, E.PEER_LOST, FailReason.PEER_LOST)
            peer.reader.end_session(session.nonce)
            self._events.put(SessionLost(session.peer_epoch, reason))

    def _endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(reader.endpoint for reader in self._readers.values())

    # --- messages ----------------------------------------------------------------------------------------------------

    def received(self, session: Session, key: RequestKey, body: TransferMessage) -> None:
        with self._lock:
            peer = self._peers[session.peer_epoch]
            match body:
                case OfferMessage():
                    self._take_offer(peer, key, body)
                case CommitMessage():
                    if (transfer := self._transfer_of(peer, key)) is not None:
                        self._take_commit(transfer, body.handover)
                case EndMessage():
                    if (transfer := self._transfer_of(peer, key)) is not None:
                        self._transfers.fire(transfer, E.END, body.reason)
                case _:
                    log.warning("unexpected_message", extra=fields(peer=session.peer_epoch, body=type(body).__name__))

    def _transfer_of(self, peer: PrefillPeer, key: RequestKey) -> Incoming | None:
        transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer.peer is peer else None

    def _take_offer(self, peer: PrefillPeer, key: RequestKey, offer: OfferMessage) -> None:
        transfer = self._transfers.get(key)
        if (
            transfer is not None and transfer.peer is not peer
        ):  # another P's, in whatever state: not this one's to touch
            self._transfers.say_refuse(peer, key, RefuseReason.UNKNOWN)
            return
        if transfer is None:
            if peer.num_early >= _MAX_EARLY:
                self._transfers.say_refuse(peer, key, RefuseReason.NO_ROOM)
                return
            transfer = self._transfers.add(key, peer)
        if transfer.offer is None:
            transfer.offer = offer
            self._transfers.fire(transfer, E.OFFER)
            if transfer.state is R.EARLY:
                self._transfers.set_timer(transfer, self._clock.now() + EARLY_S)
            elif transfer.state is R.PENDING:
                self._match(transfer)

    def _match(self, transfer: Incoming) -> None:
        """Both the call and the offer are here: they must mean the same prompt."""
        assert transfer.expectation is not None
        assert transfer.offer is not None
        called = (transfer.expectation.num_tokens, transfer.expectation.token_digest)
        if called != (transfer.offer.num_tokens, transfer.offer.token_digest):
            self._transfers.fire(transfer, E.TIMEOUT, RefuseReason.LAYOUT)
        else:
            self._events.put(Offered(transfer.key))

    def _take_commit(self, transfer: Incoming, handover: Handover) -> None:
        if transfer.handover is not None:
            return
        transfer.handover = handover
        if transfer.peer.reader.one_sided and transfer.state is R.GRANTED:
            self._finisher.finish(transfer, partial(self._finished_one_sided, transfer))
            return
        self._transfers.fire(transfer, E.COMMIT)
        self._land_if_all_in(transfer)

    # --- the bytes ---------------------------------------------------------------------------------------------------

    def _land_if_all_in(self, transfer: Incoming) -> None:
        """ALL_IN is held until COMMIT has come too: only then D knows against what to check the bytes."""
        if transfer.state is R.COMMIT_SEEN and transfer.are_bytes_in:
            self._finisher.finish(transfer, partial(self._finished_two_sided, transfer))

    def _finished_two_sided(self, transfer: Incoming, ok: bool) -> None:
        with self._lock:
            if ok:
                self._transfers.put_down(transfer, E.ALL_IN)
            else:
                self._transfers.put_down(transfer, E.DATA_FAILED, FailReason.DATA_FAILED)

    def _finished_one_sided(self, transfer: Incoming, ok: bool) -> None:
        with self._lock:
            if not ok:  # P must hear of it; its COMMIT is the proof that it writes no more
                self._transfers.fire(transfer, E.TIMEOUT, FailReason.DATA_FAILED)
            self._transfers.put_down(transfer, E.COMMIT)

    # --- the reader (ReaderEvents), on its thread --------------------------------------------------------------------

    def heard(self, session_nonce: bytes, message: bytes) -> None:
        """Served at once, on the reader's thread: so no other has to be woken for it."""
        with self._lock:
            peer = next((peer for peer in self._peers.values() if peer.session.nonce == session_nonce), None)
            if peer is None:
                return
            try:
                key, body = talking.read(session_nonce, message)
            except InvalidArgument as error:  # what it was to say is lost, and something may wait for it
                self._acceptor.num_malformed += 1
                self._acceptor.close_session(peer.session, f"malformed message: {error.message}")
            else:
                self.received(peer.session, key, body)

    def all_in(self, grant: GrantId) -> None:
        """Served at once: the request waits for it."""
        with self._lock:
            transfer = self._transfers.get(grant.key)
            if transfer is not None and transfer.grant == grant:
                transfer.are_bytes_in = True
                self._land_if_all_in(transfer)

    def reader_idle(self, grant: GrantId) -> None:
        self._loop.post(partial(self._on_reader_idle, grant))

    def read_failed(self, session_nonce: bytes, reason: str) -> None:
        self._loop.post(partial(self._on_read_failed, session_nonce, reason))

    def fenced(self, session_nonce: bytes) -> None:
        self._loop.post(partial(self._on_fenced, session_nonce))

    def _on_reader_idle(self, grant: GrantId) -> None:
        with self._lock:
            transfer = self._transfers.get(grant.key)
            if transfer is not None and transfer.grant == grant:
                self._transfers.fire(transfer, E.READER_IDLE)

    def _on_read_failed(self, session_nonce: bytes, reason: str) -> None:
        """A data connection is not made anew within its session: the session ends with it."""
        with self._lock:
            for transfer in self._transfers.all():
                if transfer.peer.session.nonce == session_nonce and not transfer.are_bytes_in:
                    self._transfers.fire(transfer, E.DATA_FAILED, FailReason.DATA_FAILED)
            for peer in self._peers.values():
                if peer.session.nonce == session_nonce:
                    self._acceptor.close_session(peer.session, reason)

    def _on_fenced(self, session_nonce: bytes) -> None:
        with self._lock:
            self._fence(session_nonce)

    def _fence(self, session_nonce: bytes, peer_epoch: str | None = None) -> None:
        """P can write no more in that session; if P itself says so, only of its own sessions."""
        for peer in self._peers.values():  # of which there may be offers yet
            if peer.session.nonce == session_nonce and peer_epoch in (None, peer.session.peer_epoch):
                peer.is_fenced = True
        for transfer in self._transfers.all():
            session = transfer.peer.session
            if session.nonce == session_nonce and peer_epoch in (None, session.peer_epoch):
                transfer.peer.is_fenced = True
                self._transfers.fire(transfer, E.FENCED)
