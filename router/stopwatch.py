"""One request's times at the router, and what the legs' reports say of the time between."""

from kvrelay.engine.legs import LegReport
from kvrelay.router.api import Timings

_NO_REPORT = LegReport()


class Stopwatch:
    """All times on the router's clock, in seconds. What no node can see alone is the remainder here."""

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival
        self._sent_at = arrival
        self._first_at: float | None = None
        self._second_at: float | None = None

    def sent(self, now: float) -> None:
        """The legs have been started."""
        self._sent_at = now

    def tokens_out(self, end: int, now: float) -> None:
        """Output tokens up to `end` (exclusive) go to the client now."""
        if self._first_at is None:
            self._first_at = now
        if self._second_at is None and end > 1:
            self._second_at = now

    @property
    def ttft_ms(self) -> float:
        """Zero until the first token is out."""
        return self._since_arrival(self._first_at)

    def timings(self, first: LegReport | None, decode: LegReport | None, now: float) -> Timings:
        """`first`: of the leg that sampled the first token; `decode`: of the decode leg, None where it is the same one.

        Remainders are never negative: two nodes' clocks may differ in rate. Without a second token its parts are zero.
        """
        first = first or _NO_REPORT
        ttft = self.ttft_ms
        second = self._since_arrival(self._second_at)
        route = self._since_arrival(self._sent_at)
        after_first = max(0.0, second - ttft)
        if decode is None:  # one node did both: nothing was transferred, nothing queued again
            queue, step = 0.0, after_first
        else:
            queue, step = decode.queue_ms, decode.compute_ms
        return Timings(
            ttft_ms=ttft,
            route_ms=route,
            prefill_queue_ms=first.queue_ms,
            prefill_ms=first.compute_ms,
            first_token_out_ms=max(0.0, ttft - route - first.queue_ms - first.compute_ms),
            second_token_ms=second,
            exposed_transfer_ms=max(0.0, after_first - queue - step),
            decode_queue_ms=queue,
            first_decode_step_ms=step,
            total_ms=self._since_arrival(now),
        )

    def _since_arrival(self, moment: float | None) -> float:
        return 0.0 if moment is None else (moment - self._arrival) * 1e3
