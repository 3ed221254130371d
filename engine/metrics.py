"""What is counted for statistics: histograms over fixed buckets, what of a count is of late, what a process uses.

Counting is cheap (a histogram takes about 200 ns a value) and takes no lock: each counter belongs to one thread.
Snapshots are frozen and may go anywhere. Standard library only.
"""

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

_COARSE = (1.0, 2.5, 5.0)
_FINE = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)  # ISO 3's R10: steps of a quarter


def decades(first: int, last: int, steps: Sequence[float] = _COARSE) -> tuple[float, ...]:
    """Bounds from 10**first to 10**last, `steps` in each decade."""
    # Through text: 0.0025, not 0.0025000000000000001 as a product may have it.
    bounds = [float(f"{step:g}e{exponent}") for exponent in range(first, last) for step in steps]
    return (*bounds, float(f"1e{last}"))


def fine_decades(first: int, last: int) -> tuple[float, ...]:
    """Bounds that quantiles can be estimated from; every bound of `decades` is one of them."""
    return decades(first, last, _FINE)


STEP_SECONDS = decades(-4, 2)  # of a node's steps
BATCH_SIZES = tuple(float(2**i) for i in range(11))  # sequences in a step


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """How often a value fell into each bucket: above the bound before, up to and with its own. The last count is of
    the values above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def since(self, earlier: "HistogramSnapshot") -> "HistogramSnapshot":
        """What came after an earlier snapshot of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.sum - earlier.sum)

    def quantile(self, q: float) -> float:
        """An estimate, as exact as the buckets are narrow: values are taken to lie evenly within theirs. Those above
        all bounds count as the highest bound. 0 where there are none."""
        rank = q * self.count
        before = 0
        for i, count in enumerate(self.counts):
            if count and before + count >= rank:
                if i == len(self.bounds):
                    break
                low, high = self.bounds[i - 1] if i else 0.0, self.bounds[i]
                return low + (high - low) * max(0.0, rank - before) / count
            before += count
        return self.bounds[-1] if self.count else 0.0

    def cumulative(self, bounds: Sequence[float]) -> tuple[int, ...]:
        """How many values are at most each of `bounds`, which are among the snapshot's own."""
        at_most = dict(zip(self.bounds, accumulate(self.counts), strict=False))
        return tuple(at_most[bound] for bound in bounds)


class Histogram:
    """Counts values into fixed buckets."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: ascending, the highest value of each bucket."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum)


def empty_histogram(bounds: tuple[float, ...]) -> HistogramSnapshot:
    return HistogramSnapshot(bounds, (0,) * (len(bounds) + 1), 0.0)


T = TypeVar("T")


class Recent(Generic[T]):
    """What a count was about a minute ago, without a timer: marks are made when something is counted or asked."""

    def __init__(self, current: Callable[[], T], now: float, *, span_s: float = 60.0, num_marks: int = 6) -> None:
        """`current`: a snapshot of the count."""
        self._current = current
        self._span_s = span_s
        self._step_s = span_s / num_marks
        self._marks: deque[tuple[float, T]] = deque([(now, current())])
        self.due = now + self._step_s

    def mark(self, now: float) -> None:
        """To be called before anything is counted at or after `due`."""
        if now < self.due:
            return
        value = self._current()
        # Nothing was counted between `due` and now, or this had been called.
        self._marks.append((self.due, value))
        self.due += self._step_s
        if now >= self.due:
            self._marks.append((now, value))
            self.due = now + self._step_s
        self._forget(now)

    def begin(self, now: float) -> tuple[float, T]:
        """When the span of late begins, and what the count was then: between one span ago and a mark more, or at the
        beginning of it all."""
        self.mark(now)
        self._forget(now)  # marks grow old between one mark and the next, too
        made_at, value = self._marks[0]
        return max(made_at, now - self._span_s - self._step_s), value  # an older one stands before a pause

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._span_s:
            self._marks.popleft()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatistics:
    """What this process uses."""

    cpu_s: float = 0.0  # of all threads, since the start
    resident_bytes: int = 0
    num_fds: int = 0
    num_threads: int = 0
    uptime_s: float = 0.0


_STARTED_AT = time.monotonic()  # about: when this was imported


def process_statistics() -> ProcessStatistics:
    """What this process uses now. Takes about 50 us, so not for every step."""
    with open("/proc/self/statm") as statm:
        num_pages = int(statm.read().split()[1])
    return ProcessStatistics(
        cpu_s=time.process_time(),
        resident_bytes=num_pages * os.sysconf("SC_PAGE_SIZE"),
        num_fds=len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists them
        num_threads=len(os.listdir("/proc/self/task")),
        uptime_s=time.monotonic() - _STARTED_AT,
    )
