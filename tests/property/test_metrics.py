"""Histograms, and what of a count is of late, against lists of every value."""

import bisect
import itertools
import math
import random

from hypothesis import given, strategies as st

from kvrelay.engine.metrics import Histogram, Recent, decades, fine_decades, process_statistics

BOUNDS = decades(-2, 1)
VALUES = st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS), max_size=60)


@given(VALUES, VALUES)
def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it(first: list[float], more: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in first:
        histogram.observe(value)
    then = histogram.snapshot()
    for value in more:
        histogram.observe(value)
    now = histogram.snapshot()
    edges = (-math.inf, *BOUNDS, math.inf)
    assert now.since(then).counts == tuple(
        sum(low < value <= high for value in more) for low, high in itertools.pairwise(edges)
    )
    assert now.count == len(first + more)
    assert math.isclose(now.sum, sum(first + more), abs_tol=1e-9)
    assert now.cumulative((0.1, 1.0)) == tuple(sum(value <= bound for value in first + more) for bound in (0.1, 1.0))


@given(VALUES.filter(bool), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_estimates(values: list[float], q: float) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    bucket = bisect.bisect_left(BOUNDS, exact)
    estimate = histogram.snapshot().quantile(q)
    if bucket == len(BOUNDS):
        assert estimate == BOUNDS[-1]
    else:
        assert (BOUNDS[bucket - 1] if bucket else 0.0) <= estimate <= BOUNDS[bucket]


def test_no_value_has_no_quantile() -> None:
    assert Histogram(BOUNDS).snapshot().quantile(0.5) == 0.0


def test_every_coarse_bound_is_a_fine_one() -> None:
    assert set(decades(-3, 3)) <= set(fine_decades(-3, 3))
    assert list(fine_decades(-3, 3)) == sorted(fine_decades(-3, 3))


@given(st.lists(st.floats(0.1, 40), max_size=60), st.floats(0, 200))
def test_of_late_is_what_came_in_the_last_span_or_a_mark_more(pauses: list[float], wait: float) -> None:
    count, now, times = 0, 0.0, []
    recent = Recent(lambda: count, now, span_s=60, num_marks=6)
    for pause in pauses:
        now += pause
        recent.mark(now)
        count += 1
        times.append(now)
    now += wait
    since, then = recent.begin(now)
    assert count - then == sum(moment >= since - 1e-9 for moment in times)
    assert since == 0 or 60 - 1e-9 <= now - since <= 70 + 1e-9


def test_a_process_knows_what_it_uses() -> None:
    statistics = process_statistics()
    assert statistics.resident_bytes > 2**20
    assert statistics.num_threads >= 1
    assert statistics.num_fds >= 3
    assert statistics.cpu_s > 0


def test_of_late_is_what_came_since_it_began_over_days_of_bursts_and_pauses() -> None:
    draw = random.Random(3)
    now, times, counted = 0.0, [], 0
    recent = Recent(lambda: len(times), now, span_s=60, num_marks=6)
    for _ in range(3000):
        now += draw.choice([0.01, 0.3, 4.9, 5.0, 17.0, 45.0, 300.0])
        if draw.random() < 0.7:
            recent.mark(now)
            times.append(now)
            continue
        since, then = recent.begin(now)
        counted += len(times) - then
        assert since == 0 or 60 - 1e-9 <= now - since <= 70 + 1e-9
        assert sum(moment > since + 1e-6 for moment in times) <= len(times) - then
        assert len(times) - then <= sum(moment >= since - 1e-6 for moment in times)
    assert counted > 1000
