"""What a load's records say: percentiles, rates, goodput. Pure.

TTFT and end-to-end count from the scheduled arrival, not from the send. TPOT is (end to end - TTFT) / (n - 1), one a
request. ITL is each gap between two messages that bring tokens, as long as it was and however many tokens came with
the second: it is there to show stalls, and a stall that is spread over the tokens behind it, or stands beside gaps of
zero within a message, would be hidden. `tokens_per_message` says how far messages are from single tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any

from kvrelay.cli.client import Handoff, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request as the client saw it. Times are seconds since the load's start."""

    index: int
    scheduled_s: float
    sent_s: float
    end_s: float  # the last message, or the error
    message_s: tuple[float, ...]  # when each message that brought tokens came
    num_input_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_cached_tokens: int = 0
    error: str = ""  # its code
    error_message: str = ""
    retryable: bool = False
    timings: Timings | None = None
    handoff: Handoff | None = None

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def lateness_s(self) -> float:
        """How long after its time the client itself sent it."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.message_s[0] - self.scheduled_s if self.message_s else None

    @property
    def end_to_end_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """None of an answer of one token."""
        if self.num_output_tokens < 2 or not self.message_s:
            return None
        return (self.end_s - self.message_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.message_s, self.message_s[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count as good; None: anything goes."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def keeps(self, record: Record) -> bool:
        """A request that failed keeps none."""
        return (
            record.succeeded
            and _within(record.ttft_s, self.ttft_ms)
            and (record.tpot_s is None or _within(record.tpot_s, self.tpot_ms))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A distribution, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests within the limits."""

    count: int
    share: float  # of all requests, the failed ones too
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """A load as a whole. Times and token counts are of requests that succeeded; None where there is nothing to say."""

    num_requests: int
    num_failed: int
    duration_s: float  # from the load's start to its last end
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    tokens_per_message: float | None
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    end_to_end_ms: Summary | None
    lateness_ms: Summary | None  # of all requests
    goodput: Goodput | None  # None without limits
    errors: dict[str, int]  # by code
    timings: dict[str, float]  # the median of each of the router's timings
    handoff: dict[str, float]  # the same of the hand-offs' figures


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `ordered` lies.

    Of n values in ascending order, the one at index share * (n - 1), interpolated linearly between its neighbours
    (Hyndman and Fan's type 7, numpy's default).
    """
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise_ms(values_s: Iterable[float | None]) -> Summary | None:
    """The distribution of what there is among these seconds."""
    ordered = sorted(value * 1e3 for value in values_s if value is not None)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Summary(count=len(ordered), mean=fmean(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def summarise(records: Sequence[Record], limits: Limits) -> LoadSummary:
    """All of a load that has come to its end; at least one record."""
    good = [record for record in records if record.succeeded]
    duration_s = max(record.end_s for record in records)

    def total(count: Callable[[Record], int]) -> int:
        return sum(count(record) for record in good)

    num_input, num_output = total(lambda r: r.num_input_tokens), total(lambda r: r.num_output_tokens)
    num_messages = total(lambda r: len(r.message_s))
    return LoadSummary(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s,
        input_tokens_per_s=num_input / duration_s,
        output_tokens_per_s=num_output / duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=total(lambda r: r.num_cached_tokens),
        tokens_per_message=num_output / num_messages if num_messages else None,
        ttft_ms=summarise_ms(record.ttft_s for record in good),
        tpot_ms=summarise_ms(record.tpot_s for record in good),
        itl_ms=summarise_ms(gap for record in good for gap in record.gaps_s),
        end_to_end_ms=summarise_ms(record.end_to_end_s for record in good),
        lateness_ms=summarise_ms(record.lateness_s for record in records),
        goodput=_goodput(records, limits, duration_s),
        errors=dict(Counter(record.error for record in records if record.error)),
        timings=_medians([record.timings for record in good if record.timings]),
        handoff=_medians([record.handoff for record in good if record.handoff]),
    )


def _goodput(records: Sequence[Record], limits: Limits, duration_s: float) -> Goodput | None:
    if limits == Limits():
        return None
    count = sum(limits.keeps(record) for record in records)
    return Goodput(count=count, share=count / len(records), requests_per_s=count / duration_s)


def _within(value_s: float | None, limit_ms: float | None) -> bool:
    return limit_ms is None or (value_s is not None and value_s * 1e3 <= limit_ms)


def _medians(rows: Sequence[Any]) -> dict[str, float]:
    """The median of every number of equal dataclasses."""
    names = [field.name for field in fields(rows[0])] if rows else []
    numbers = [name for name in names if isinstance(getattr(rows[0], name), (int, float))]
    return {name: float(median(getattr(row, name) for row in rows)) for name in numbers}
