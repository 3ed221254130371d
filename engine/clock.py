"""Where time comes from: the real clock, and one for tests that moves only when told. Standard library only."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float: ...


class MonotonicClock:
    """This process's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock for tests."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
