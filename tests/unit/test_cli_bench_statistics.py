"""A load's figures against brute force and numpy."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvrelay.cli.bench_statistics import Goodput, Limits, Record, percentile, summarise, summarise_ms
from kvrelay.cli.client import Handoff, Timings

ANY = Limits()


def make_record(**values: object) -> Record:
    """Scheduled at 1 s and sent at once; tokens at 1.5, 1.6 and 2 s; whole at 2 s."""
    given = {"index": 0, "scheduled_s": 1.0, "sent_s": 1.0, "end_s": 2.0, "message_s": (1.5, 1.6, 2.0)}
    return Record(**given | {"num_input_tokens": 10, "num_output_tokens": 3, "max_tokens": 3} | values)


def random_records(seed: int, count: int) -> list[Record]:
    rng = random.Random(seed)
    records = []
    for index in range(count):
        scheduled_s = rng.uniform(0, 10)
        sent_s = scheduled_s + rng.expovariate(1000)
        message_s = sorted(sent_s + rng.expovariate(1) for _ in range(rng.randint(1, 6)))
        records.append(
            Record(
                index=index,
                scheduled_s=scheduled_s,
                sent_s=sent_s,
                end_s=message_s[-1] + rng.expovariate(100),
                message_s=tuple(message_s),
                num_input_tokens=rng.randint(1, 100),
                num_output_tokens=len(message_s) + rng.randint(0, 3),
                max_tokens=9,
                num_cached_tokens=rng.randint(0, 5),
                error=rng.choice(["", "", "", "UNAVAILABLE", "DEADLINE_EXCEEDED"]),
            )
        )
    return records


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
    share=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]) | st.floats(0, 1),
)
def test_percentiles_are_numpy_s(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


def test_a_percentile_between_two_values_is_interpolated() -> None:
    assert percentile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert percentile([5.0], 0.99) == 5.0


def test_a_request_s_times_count_from_its_schedule() -> None:
    record = make_record(sent_s=1.4)
    assert record.lateness_s == pytest.approx(0.4)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.end_to_end_s == pytest.approx(1.0)
    assert record.tpot_s == pytest.approx(0.25)
    assert record.gaps_s == pytest.approx((0.1, 0.4))


def test_a_message_of_several_tokens_is_one_gap_and_all_its_tokens_count_for_tpot() -> None:
    record = make_record(message_s=(1.5, 2.0), num_output_tokens=6)
    assert record.gaps_s == pytest.approx((0.5,))
    assert record.tpot_s == pytest.approx(0.1)
    assert summarise([record], ANY).tokens_per_message == 3.0


def test_an_answer_of_one_token_has_no_tpot() -> None:
    record = make_record(message_s=(1.5,), num_output_tokens=1)
    assert (record.tpot_s, record.gaps_s) == (None, ())
    summary = summarise([record], Limits(tpot_ms=1.0))
    assert (summary.tpot_ms, summary.itl_ms) == (None, None)
    assert summary.goodput == Goodput(count=1, share=1.0, requests_per_s=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_summary_is_what_brute_force_finds(seed: int) -> None:
    records = random_records(seed, 40)
    limits = Limits(ttft_ms=800.0, tpot_ms=500.0)
    summary = summarise(records, limits)
    good = [record for record in records if record.error == ""]
    duration = max(record.end_s for record in records)
    ttft = [(record.message_s[0] - record.scheduled_s) * 1000 for record in good]
    tpot = [
        ((record.end_s - record.scheduled_s) * 1000 - first) / (record.num_output_tokens - 1)
        for record, first in zip(good, ttft, strict=True)
        if record.num_output_tokens > 1
    ]
    gaps = [gap * 1000 for record in good for gap in np.diff(record.message_s)]
    whole = [(record.end_s - record.scheduled_s) * 1000 for record in good]
    late = [(record.sent_s - record.scheduled_s) * 1000 for record in records]
    found = (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.end_to_end_ms, summary.lateness_ms)
    for one, values in zip(found, (ttft, tpot, gaps, whole, late), strict=True):
        assert one is not None
        assert one.count == len(values)
        assert one.mean == pytest.approx(np.mean(values))
        assert [one.p50, one.p90, one.p99, one.max] == pytest.approx(list(np.percentile(values, [50, 90, 99, 100])))
    assert summary.num_failed == len(records) - len(good) == sum(summary.errors.values())
    assert summary.output_tokens_per_s == pytest.approx(sum(r.num_output_tokens for r in good) / duration)
    assert summary.input_tokens_per_s == pytest.approx(sum(r.num_input_tokens for r in good) / duration)
    assert summary.requests_per_s == pytest.approx(len(good) / duration)
    kept = 0
    for record, first in zip(good, ttft, strict=True):
        others = record.num_output_tokens - 1
        kept += first <= 800 and (not others or (record.end_s - record.message_s[0]) * 1000 / others <= 500)
    assert summary.goodput == Goodput(count=kept, share=kept / 40, requests_per_s=kept / duration)


def test_a_failed_request_keeps_no_limit_and_is_in_no_latency() -> None:
    good, failed = make_record(), make_record(error="UNAVAILABLE", end_s=4.0, message_s=(3.0,))
    summary = summarise([good, failed], Limits(ttft_ms=1e6))
    assert summary.goodput == Goodput(count=1, share=0.5, requests_per_s=0.25)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(500)
    assert summary.errors == {"UNAVAILABLE": 1}
    assert (summary.num_requests, summary.num_failed, summary.num_output_tokens) == (2, 1, 3)


def test_a_limit_is_kept_at_its_very_value() -> None:
    assert Limits(ttft_ms=500.0, tpot_ms=250.0).keeps(make_record())
    assert not Limits(ttft_ms=499.0).keeps(make_record())
    assert not Limits(tpot_ms=249.0).keeps(make_record())


def test_without_limits_there_is_no_goodput_and_without_values_no_distribution() -> None:
    summary = summarise([make_record(error="INTERNAL", message_s=())], ANY)
    assert (summary.goodput, summary.ttft_ms, summary.tokens_per_message) == (None, None, None)
    assert summarise_ms([None, None]) is None


def test_the_router_s_own_figures_are_medians_over_those_that_have_them() -> None:
    zero = dict.fromkeys(Timings.__slots__, 0.0)
    timings = [Timings(**zero | {"exposed_transfer_ms": value}) for value in (1.0, 9.0, 2.0)]
    handoff = Handoff(
        kv_bytes=100,
        kv_blocks=1,
        cached_blocks=0,
        grant_ms=1.0,
        transfer_ms=4.0,
        transport="zmq",
        prefill_node="p",
        decode_node="d",
    )
    records = [make_record(timings=one, handoff=handoff) for one in timings]
    records += [make_record(handoff=replace(handoff, kv_bytes=300)), make_record()]
    summary = summarise(records, ANY)
    assert summary.timings["exposed_transfer_ms"] == 2.0
    assert summary.handoff == {
        "kv_bytes": 100.0,
        "kv_blocks": 1.0,
        "cached_blocks": 0.0,
        "grant_ms": 1.0,
        "transfer_ms": 4.0,
    }
