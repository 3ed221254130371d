"""The events that wait for the engine thread, and the closed transfers that must not come back to life."""

import threading
from collections import OrderedDict

from kvrelay.connector.base import Reason, TransferEvent, WakeUp
from kvrelay.engine.request import RequestKey

MAX_CLOSED = 65_536


class EventQueue:
    """Filled by the connector, emptied by the engine thread, in order."""

    def __init__(self, wake_up: WakeUp) -> None:
        self._wake_up = wake_up
        self._lock = threading.Lock()
        self._events: list[TransferEvent] = []

    def put(self, event: TransferEvent) -> None:
        with self._lock:
            self._events.append(event)
        self._wake_up()

    def take(self) -> list[TransferEvent]:
        with self._lock:
            taken, self._events = self._events, []
        return taken

    def discard(self, event: TransferEvent) -> None:
        """Take back what was not fetched yet, if it is there."""
        with self._lock:
            self._events = [waiting for waiting in self._events if waiting != event]


class ClosedTransfers:
    """Why the transfers of one session ended; the oldest are forgotten beyond MAX_CLOSED."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[RequestKey, Reason] = OrderedDict()

    def add(self, key: RequestKey, reason: Reason) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > MAX_CLOSED:
            self._reasons.popitem(last=False)

    def get(self, key: RequestKey) -> Reason | None:
        return self._reasons.get(key)
