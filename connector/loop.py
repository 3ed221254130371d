"""One thread that waits: for sockets, for calls posted by other threads, and for timers. Idle, it uses no CPU.

A callback that raises is logged and fails nothing but itself: what is shared by all transfers must outlive each.
"""

import heapq
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from kvrelay.engine.clock import Clock
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)

Callback = Callable[[], None]
_MIN_SWEEP = 1024  # timers, before the cancelled ones among them are thrown out


class Timer:
    """A call that is due at some time, unless cancelled before."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callback) -> None:
        self.due = due
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """A thread with a poller. `post`, `call_at` and `wake` may be called from any thread, the rest on its own only."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._eventfd, zmq.POLLIN)
        self._watched: dict[Any, Callback] = {}
        self._posted: deque[Callback] = deque()  # appended to by any thread, popped by ours
        self._lock = threading.Lock()  # guards the timers, and the eventfd's end
        self._timers: list[tuple[float, int, Timer]] = []
        self._sweep_at = _MIN_SWEEP
        self._closed = False
        self._order = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Let the thread finish what is posted, then end it. Whether it ended in time."""
        if self._thread.ident is None:  # never started
            self._close()
            return True
        self.post(self._end)
        if self.is_own_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, call: Callback) -> None:
        """Run `call` on the loop's thread, in the order posted."""
        self._posted.append(call)
        if not self.is_own_thread():
            self.wake()

    def wake(self) -> None:
        """Look at timers and posted calls again."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._eventfd, 1)

    def call_at(self, due: float, callback: Callback) -> Timer:
        """Run `callback` on the loop's thread when the clock shows `due`."""
        timer = Timer(due, callback)
        with self._lock:
            if len(self._timers) > self._sweep_at:
                self._timers = [entry for entry in self._timers if entry[2].callback is not None]
                heapq.heapify(self._timers)
                self._sweep_at = max(_MIN_SWEEP, 2 * len(self._timers))
            heapq.heappush(self._timers, (due, next(self._order), timer))
            is_next = self._timers[0][2] is timer
        if is_next and not self.is_own_thread():
            self.wake()
        return timer

    def call_in(self, delay_s: float, callback: Callback) -> Timer:
        return self.call_at(self._clock.now() + delay_s, callback)

    def watch(self, source: Any, flags: int, callback: Callback) -> None:
        """Run `callback` whenever a socket, or a file descriptor, is ready."""
        self._poller.register(source, flags)
        self._watched[source] = callback

    def unwatch(self, source: Any) -> None:
        self._poller.unregister(source)
        del self._watched[source]

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            for source, _flags in self._poller.poll(self._timeout_ms()):
                if source == self._eventfd:
                    os.eventfd_read(self._eventfd)
                elif (callback := self._watched.get(source)) is not None:  # an earlier one may have unwatched it
                    self._call(callback)
            self._run_due()
            self._run_posted()
        self._close()

    def _close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._eventfd)

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._call(self._posted.popleft())

    def _run_due(self) -> None:
        now = self._clock.now()
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
            callback, timer.callback = timer.callback, None
            if callback is not None:
                self._call(callback)

    def _timeout_ms(self) -> int | None:
        if self._posted:
            return 0
        with self._lock:
            while self._timers and self._timers[0][2].callback is None:
                heapq.heappop(self._timers)
            if not self._timers:
                return None
            due_in_s = self._timers[0][0] - self._clock.now()
        return min(max(0, int(due_in_s * 1000) + 1), 2**31 - 1)

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:  # the root of whatever was called: the other callbacks go on
            log.exception("callback_failed", extra=fields(thread=self._name))

    def _end(self) -> None:
        self._stopping = True
