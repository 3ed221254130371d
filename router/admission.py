"""How many client calls are inside, how many of them wait, and what those that find no room are told.

A request waits until its first output and runs from then on. Both numbers are bounded, and nothing else refuses for
want of room: how long a request will wait is not foreseen, since others may pass it, and one that runs out of time has
taken nothing of a node but its place in the queue.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ResourceExhausted, Unavailable

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
_NUM_REMEMBERED = 64  # places that became free, from which the rate is taken


class Crowd:
    """Those that hold a place of one kind, and how fast places become free while there are any."""

    def __init__(self, clock: Clock) -> None:
        self.size = 0
        self._clock = clock
        # When there was somebody again, then when each place became free; the oldest are forgotten.
        self._freed: deque[float] = deque(maxlen=1 + _NUM_REMEMBERED)

    def enter(self) -> None:
        if not self.size:
            self._freed.clear()
            self._freed.append(self._clock.now())
        self.size += 1

    def leave(self, *, was_served: bool) -> None:
        """Who leaves unserved (a mistake, a cancel, no time left) says nothing of how fast it goes."""
        self.size -= 1
        if was_served:
            self._freed.append(self._clock.now())

    def retry_s(self) -> float:
        """In about how many seconds half of the places will be free, at the rate of late; in [0.1, 30].

        Half: who comes back then finds room, and the nodes have not run out of work. A standstill counts: the rate
        falls as long as nobody leaves.
        """
        if not self.size:
            return MIN_RETRY_S
        since_s = self._clock.now() - self._freed[0]
        # One more than have left: the next is on its way, and where nobody has left yet there is no better guess.
        return min(max(self.size / 2 * since_s / len(self._freed), MIN_RETRY_S), MAX_RETRY_S)


class Stay:
    """One request's place among those that wait, then among those that run."""

    def __init__(self, waiting: Crowd) -> None:
        self._waiting = waiting
        self.has_begun = False
        waiting.enter()

    def begin(self) -> None:
        """Its first output is there: it waits no longer. Again: nothing."""
        if not self.has_begun:
            self.has_begun = True
            self._waiting.leave(was_served=True)

    def end(self) -> None:
        if not self.has_begun:
            self._waiting.leave(was_served=False)


class Admission:
    """Counts calls in and out. Belongs to the event loop."""

    def __init__(self, max_requests: int, max_waiting: Callable[[], int], clock: Clock) -> None:
        """`max_waiting`: how many may wait now; it goes with the nodes that are there."""
        self._max_requests = max_requests
        self._max_waiting = max_waiting
        self._calls = Crowd(clock)
        self._waiting = Crowd(clock)
        self.draining = False
        self.num_refused = 0  # for want of room
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_requests(self) -> int:
        """Calls inside, of whatever kind."""
        return self._calls.size

    @property
    def num_waiting(self) -> int:
        """Requests that have no output yet."""
        return self._waiting.size

    @contextmanager
    def admit(self) -> Iterator[None]:
        """The stay of a call that the router answers by itself.

        Raises: ResourceExhausted beyond the limit, Unavailable while draining.
        """
        self._check_calls()
        self._enter()
        try:
            yield
        finally:
            self._leave(was_served=False)

    @contextmanager
    def admit_request(self) -> Iterator[Stay]:
        """The stay of a request, which is to `begin` with its first output.

        Raises: ResourceExhausted beyond a limit, with when to come back; Unavailable while draining.
        """
        self._check_calls()
        most = self._max_waiting()
        if self._waiting.size >= most:
            raise self._full(f"{most} requests wait for their first token already", self._waiting)
        self._enter()
        stay = Stay(self._waiting)
        try:
            yield stay
        finally:
            stay.end()
            self._leave(was_served=stay.has_begun)

    async def drain(self) -> None:
        """Take nothing new, and wait until the last call has left."""
        self.draining = True
        await self._empty.wait()

    def _check_calls(self) -> None:
        if self.draining:
            raise Unavailable("this router is shutting down")
        if self._calls.size >= self._max_requests:
            raise self._full(f"{self._max_requests} requests wait or run already", self._calls)

    def _enter(self) -> None:
        self._calls.enter()
        self._empty.clear()

    def _leave(self, *, was_served: bool) -> None:
        self._calls.leave(was_served=was_served)
        if not self._calls.size:
            self._empty.set()

    def _full(self, what: str, crowd: Crowd) -> ResourceExhausted:
        self.num_refused += 1
        retry_s = crowd.retry_s()
        return ResourceExhausted(f"{what}; try again in {retry_s:.1f} s", retry_s)
