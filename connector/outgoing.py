"""P's transfers: what is known of each, and the sender's table carried out for it. No sockets, no threads of its own.

All methods expect the sender's lock to be held, except that `lock` is taken here when a timer runs out.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite

from kvrelay.connector.base import Delivered, EndReason, Failed, FailReason, Handover, Offer, Reason, Released
from kvrelay.connector.dialer import Dialer
from kvrelay.connector.events import EventQueue
from kvrelay.connector.handoff import SENDER, A, E, S, step
from kvrelay.connector.loop import Loop, Timer
from kvrelay.connector.messages import CommitMessage, EndMessage, GrantId, OfferMessage
from kvrelay.connector.plan import PushPlan, RecastPlan
from kvrelay.connector.session import Say, Session
from kvrelay.connector.traffic import TrafficCount
from kvrelay.connector.transport.base import Link
from kvrelay.engine.request import RequestKey

_END_REASONS = {
    E.TIMEOUT: EndReason.DEADLINE,
    E.WRITE_FAILED: EndReason.WRITE_FAILED,
    E.PEER_LOST: EndReason.SHUTDOWN,  # heard only by a D that is there all the same: P was told to leave it
}


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A D that was named by `connect`, and its session if there is one."""

    dialer: Dialer
    session: Session | None = None
    link: Link | None = None
    say: Say | None = None  # on whatever carries the session's messages
    is_down_said: bool = False
    is_leaving: bool = False  # disconnected: gone when its transfers are


@dataclass(slots=True, eq=False)
class Outgoing:
    """One offered prompt."""

    offer: Offer
    peer: DecodePeer
    session: Session
    link: Link
    say: Say
    plan: PushPlan | RecastPlan
    state: S = S.OFFERED
    grant: GrantId | None = None
    num_written: int = 0
    handover: Handover | None = None
    timer: Timer | None = None
    reason: Reason = FailReason.UNKNOWN  # of the last event that could end it
    retryable: bool = False
    end_reason: EndReason = EndReason.CANCELLED  # what END will say
    is_quiet: bool = False  # the caller learns of FREE from what `cancel` returns

    @property
    def key(self) -> RequestKey:
        return self.offer.key


class OutgoingTransfers:
    """Every transfer whose blocks P still holds. `on_closed` is called for each that is over."""

    def __init__(
        self, loop: Loop, events: EventQueue, lock: threading.RLock, on_closed: Callable[[Outgoing], None]
    ) -> None:
        self.num_delivered = 0
        self.num_failed = 0
        self.num_bytes = 0
        self.traffic = TrafficCount()
        self._loop = loop
        self._events = events
        self._lock = lock
        self._on_closed = on_closed
        self._live: dict[RequestKey, Outgoing] = {}
        self._states: Counter[S] = Counter()

    def get(self, key: RequestKey) -> Outgoing | None:
        return self._live.get(key)

    def all(self) -> list[Outgoing]:
        return list(self._live.values())

    def states(self) -> dict[str, int]:
        return {state.value: count for state, count in self._states.items() if count}

    def add(self, transfer: Outgoing) -> None:
        """Say OFFER."""
        assert transfer.key not in self._live, "a transfer's key is used once"
        self._live[transfer.key] = transfer
        self._states[transfer.state] += 1
        transfer.say(OfferMessage(transfer.offer.num_tokens, transfer.offer.token_digest), transfer.key)
        if isfinite(transfer.offer.deadline):
            transfer.timer = self._loop.call_at(transfer.offer.deadline, partial(self._expired, transfer))

    def refuse(self, key: RequestKey, reason: Reason) -> None:
        """An offer that cannot be made."""
        self.num_failed += 1
        self._events.put(Failed(key, reason, reason.retryable))
        self._events.put(Released(key))

    def _expired(self, transfer: Outgoing) -> None:
        with self._lock:
            self.fire(transfer, E.TIMEOUT, FailReason.TIMEOUT)

    def fire(self, transfer: Outgoing, event: E, reason: Reason | None = None, retryable: bool | None = None) -> None:
        """Take one step. `reason` is said to the engine, if the step fails the transfer; `retryable`: as it says."""
        before = transfer.state
        transfer.state, actions = step(SENDER, before, event)
        if transfer.state is before:
            return
        self._states[before] -= 1
        self._states[transfer.state] += 1
        if reason is not None:
            transfer.reason = reason
            transfer.retryable = reason.retryable if retryable is None else retryable
        transfer.end_reason = _END_REASONS.get(event, transfer.end_reason)
        for action in actions:
            self._act(transfer, action)
        if A.FREE in actions and not transfer.is_quiet:  # behind every other event of the transfer
            self._events.put(Released(transfer.key))
        self._enter(transfer)

    def _enter(self, transfer: Outgoing) -> None:
        """What a new state asks for by itself."""
        match transfer.state:
            case S.SENDING:
                self.write_due(transfer)
            case S.DRAINING:
                if transfer.grant is None or transfer.link.stop(transfer.grant):
                    self.fire(transfer, E.WRITER_IDLE)
            case S.CLOSED:
                self._forget(transfer)

    def _act(self, transfer: Outgoing, action: A) -> None:
        match action:
            case A.SAY_COMMIT:
                assert transfer.handover is not None
                transfer.say(CommitMessage(transfer.plan.with_digests(transfer.handover)), transfer.key)
            case A.SAY_END:
                transfer.say(EndMessage(transfer.end_reason), transfer.key)
            case A.REPORT_DELIVERED:
                self.num_delivered += 1
                self.traffic.add(transfer.session.endpoint.name, num_landed=1)
                self._events.put(Delivered(transfer.key))
            case A.REPORT_FAILED:
                self.num_failed += 1
                self._events.put(Failed(transfer.key, transfer.reason, transfer.retryable))
            case A.REPORT_UNKNOWN:
                self.num_failed += 1
                self._events.put(Failed(transfer.key, FailReason.UNKNOWN, FailReason.UNKNOWN.retryable))
            case A.FREE | A.START_WRITER | A.STOP_WRITER:  # done by `fire`, after the others
                pass

    def write_due(self, transfer: Outgoing) -> None:
        """Give the writer what is pushed, granted and not yet written; say COMMIT if that is all there was to write."""
        if transfer.state is not S.SENDING or transfer.grant is None:
            return
        copies = transfer.plan.take_due()
        if copies:
            transfer.link.write(transfer.grant, copies)
        if transfer.handover is not None and transfer.num_written == transfer.plan.num_granted_bytes:
            self.fire(transfer, E.ALL_WRITTEN)

    def _forget(self, transfer: Outgoing) -> None:
        del self._live[transfer.key]
        self._states[transfer.state] -= 1
        if transfer.timer is not None:
            transfer.timer.cancel()
        self._on_closed(transfer)
