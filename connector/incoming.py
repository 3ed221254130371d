"""D's transfers: what is known of each, and the receiver's table carried out for it. No sockets, no threads of its own.

All methods expect the receiver's lock to be held, except that `lock` is taken here when a timer runs out.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

from kvrelay.connector.base import (
    EndReason,
    Expectation,
    Failed,
    FailReason,
    GrantPlan,
    Handover,
    Landed,
    Quarantined,
    Reason,
    RefuseReason,
    Released,
)
from kvrelay.connector.events import ClosedTransfers, EventQueue
from kvrelay.connector.handoff import A, E, R, ReceiverRows, step
from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import Ack, GrantId, GrantMessage, OfferMessage, RefuseMessage, Revoke
from kvrelay.connector.plan import plan_block_ids
from kvrelay.connector.session import Say, Session
from kvrelay.connector.traffic import TrafficCount
from kvrelay.connector.transport.base import Reader
from kvrelay.engine.clock import Clock
from kvrelay.engine.request import RequestKey

REVOKE_S = 5.0  # how long P may take to stop before its silence is shown as quarantine
_NOTHING = GrantPlan(())
_FREEING = frozenset({E.COMMIT, E.END, E.FENCED, E.READER_IDLE})  # each may say that nobody writes any more
_REFUSALS: dict[Reason, RefuseReason] = {
    FailReason.TIMEOUT: RefuseReason.DEADLINE,
    EndReason.SHUTDOWN: RefuseReason.SHUTDOWN,
}


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """A P with an open session, or one whose session is over and left blocks in quarantine."""

    session: Session
    say: Say  # on whatever carries the session's messages
    reader: Reader
    table: ReceiverRows
    closed: ClosedTransfers = field(default_factory=ClosedTransfers)
    num_early: int = 0
    is_fenced: bool = False


@dataclass(slots=True, eq=False)
class Incoming:
    """One hand-off, as D sees it."""

    key: RequestKey
    peer: PrefillPeer
    state: R = R.NONE
    expectation: Expectation | None = None
    offer: OfferMessage | None = None
    plan: GrantPlan = _NOTHING
    grant: GrantId | None = None
    granted_at: float = 0.0
    handover: Handover | None = None
    are_bytes_in: bool = False
    is_in_hand: bool = False  # our own thread is writing into the blocks
    put_off: list[tuple[E, Reason | None]] = field(default_factory=list)  # what came meanwhile
    timer: Timer | None = None
    reason: Reason = FailReason.UNKNOWN  # of the last event that could end it
    is_quiet: bool = False  # the caller learns of FREE from what `cancel` returns

    @property
    def num_blocks(self) -> int:
        return len(plan_block_ids(self.plan))


class IncomingTransfers:
    """Every transfer that is not over. `on_closed` is called for each that is."""

    def __init__(
        self,
        loop: Loop,
        clock: Clock,
        events: EventQueue,
        lock: threading.RLock,
        on_closed: Callable[[], None],
    ) -> None:
        self.num_landed = 0
        self.num_failed = 0
        self.num_bytes = 0
        self.traffic = TrafficCount()
        self._loop = loop
        self._clock = clock
        self._events = events
        self._lock = lock
        self._on_closed = on_closed
        self._live: dict[RequestKey, Incoming] = {}
        self._states: Counter[R] = Counter()

    def get(self, key: RequestKey) -> Incoming | None:
        return self._live.get(key)

    def all(self) -> list[Incoming]:
        return list(self._live.values())

    def states(self) -> dict[str, int]:
        return {state.value: count for state, count in self._states.items() if count}

    def num_quarantined_blocks(self) -> int:
        if not self._states[R.QUARANTINED]:
            return 0
        return sum(transfer.num_blocks for transfer in self._live.values() if transfer.state is R.QUARANTINED)

    def add(self, key: RequestKey, peer: PrefillPeer) -> Incoming:
        """A transfer nobody has heard of; or one that has ended in this session, and can only end again."""
        transfer = Incoming(key, peer)
        reason = peer.closed.get(key)
        if reason is not None:
            transfer.state, transfer.reason = R.CLOSED, reason
        self._live[key] = transfer
        self._states[transfer.state] += 1
        return transfer

    def set_timer(self, transfer: Incoming, due: float) -> None:
        """TIMEOUT then; replaces the timer there was."""
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.timer = self._loop.call_at(due, partial(self._expired, transfer)) if isfinite(due) else None

    def _expired(self, transfer: Incoming) -> None:
        with self._lock:
            nobody_called = transfer.state is R.EARLY
            self.fire(transfer, E.TIMEOUT, RefuseReason.UNKNOWN if nobody_called else FailReason.TIMEOUT)

    def fire(self, transfer: Incoming, event: E, reason: Reason | None = None) -> None:
        """Take one step. `reason` is said to P and to the engine, if the step ends the transfer."""
        if transfer.is_in_hand and event in _FREEING:
            transfer.put_off.append((event, reason))
            return
        before = transfer.state
        transfer.state, actions = step(transfer.peer.table, before, event)
        if transfer.state is before and not actions:
            return
        self._states[before] -= 1
        self._states[transfer.state] += 1
        transfer.peer.num_early += (transfer.state is R.EARLY) - (before is R.EARLY)
        if reason is not None:
            transfer.reason = reason
        for action in actions:
            self._act(transfer, action)
        if A.FREE in actions and not transfer.is_quiet:  # behind every other event of the transfer
            self._events.put(Released(transfer.key))
        self._enter(transfer)

    def put_down(self, transfer: Incoming, event: E, reason: Reason | None = None) -> None:
        """What `is_in_hand` spoke of is done: `event` says how; then comes what was put off."""
        transfer.is_in_hand = False
        put_off, transfer.put_off = transfer.put_off, []
        for late in ((event, reason), *put_off):
            self.fire(transfer, *late)

    def _enter(self, transfer: Incoming) -> None:
        """What a new state asks for by itself."""
        match transfer.state:
            case R.STOPPING:
                assert transfer.grant is not None
                if transfer.peer.reader.stop(transfer.grant):
                    self.fire(transfer, E.READER_IDLE)
            case R.REVOKED:
                self.set_timer(transfer, self._clock.now() + REVOKE_S)
            case R.QUARANTINED:
                if transfer.peer.is_fenced:
                    self.fire(transfer, E.FENCED)
                else:
                    self._events.put(Quarantined(transfer.key))
            case R.LANDED | R.CLOSED:
                self._forget(transfer)

    def _act(self, transfer: Incoming, action: A) -> None:
        say = transfer.peer.say
        match action:
            case A.RESERVE:
                assert transfer.grant is not None
                if transfer.plan.ranges:
                    self._accept(transfer, transfer.grant)
            case A.SAY_GRANT:
                assert transfer.grant is not None
                say(GrantMessage(transfer.grant.grant_nonce, transfer.plan), transfer.key)
            case A.SAY_REFUSE:
                self.say_refuse(transfer.peer, transfer.key, _as_refusal(transfer.reason))
            case A.SAY_ACK:
                say(Ack(), transfer.key)
            case A.SAY_REVOKE:
                say(Revoke(), transfer.key)
            case A.START_REQUEST:
                self._start_request(transfer)
            case A.REPORT_FAILED:
                self.report_failed(transfer.key, transfer.reason)
            case A.FREE:  # done by `fire`, after the others
                pass

    def _accept(self, transfer: Incoming, grant: GrantId) -> None:
        transit, block_ids = transfer.peer.session.transit, plan_block_ids(transfer.plan)
        if transit.block_bytes == transit.target.block_bytes:
            transfer.peer.reader.accept(grant, block_ids)
        else:
            transfer.peer.reader.accept(grant, block_ids, transit.block_bytes)

    def say_refuse(self, peer: PrefillPeer, key: RequestKey, reason: RefuseReason) -> None:
        peer.say(RefuseMessage(reason, reason.retryable), key)

    def report_failed(self, key: RequestKey, reason: Reason) -> None:
        self.num_failed += 1
        self._events.put(Failed(key, reason, reason.retryable))

    def _start_request(self, transfer: Incoming) -> None:
        assert transfer.handover is not None
        num_bytes = transfer.num_blocks * transfer.peer.session.transit.block_bytes
        self.num_landed += 1
        self.num_bytes += num_bytes
        self.traffic.add(transfer.peer.session.endpoint.name, num_landed=1, num_bytes=num_bytes)
        self._events.put(
            Landed(
                key=transfer.key,
                handover=transfer.handover,
                num_bytes=num_bytes,
                transfer_s=self._clock.now() - transfer.granted_at,
                transport=transfer.peer.session.endpoint.name,
            )
        )

    def _forget(self, transfer: Incoming) -> None:
        del self._live[transfer.key]
        self._states[transfer.state] -= 1
        if transfer.timer is not None:
            transfer.timer.cancel()
        transfer.peer.closed.add(transfer.key, transfer.reason)
        self._on_closed()


def _as_refusal(reason: Reason) -> RefuseReason:
    """How D says to P what ended a transfer before it was granted."""
    return reason if isinstance(reason, RefuseReason) else _REFUSALS.get(reason, RefuseReason.UNKNOWN)
