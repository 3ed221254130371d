"""The segments of DESIGN's two sums: they add up, and none is negative."""

import pytest

from kvrelay.engine.legs import LegReport
from kvrelay.router.stopwatch import Stopwatch


def ran(*token_times: float) -> Stopwatch:
    stopwatch = Stopwatch(10.0)
    stopwatch.sent(10.002)
    for i, moment in enumerate(token_times):
        stopwatch.tokens_out(i + 1, moment)
    return stopwatch


def test_both_sums_add_up() -> None:
    prefill, decode = LegReport(queue_ms=3, compute_ms=40), LegReport(queue_ms=5, compute_ms=20)
    timings = ran(10.050, 10.080, 10.1).timings(prefill, decode, 10.2)
    assert timings.route_ms == pytest.approx(2)
    assert timings.first_token_out_ms == pytest.approx(5)
    assert timings.ttft_ms == pytest.approx(50)
    assert timings.exposed_transfer_ms == pytest.approx(5)
    assert timings.second_token_ms == pytest.approx(80)
    assert timings.total_ms == pytest.approx(200)


def test_remainders_are_never_negative() -> None:
    prefill, decode = LegReport(queue_ms=30, compute_ms=40), LegReport(queue_ms=50, compute_ms=20)
    timings = ran(10.050, 10.080).timings(prefill, decode, 10.2)
    assert (timings.first_token_out_ms, timings.exposed_transfer_ms) == (0, 0)


def test_one_node_for_both_legs_has_no_transfer() -> None:
    timings = ran(10.050, 10.080).timings(LegReport(queue_ms=3, compute_ms=40), None, 10.2)
    assert (timings.exposed_transfer_ms, timings.decode_queue_ms) == (0, 0)
    assert timings.first_decode_step_ms == pytest.approx(30)


def test_without_a_second_token_its_parts_are_zero() -> None:
    for decode in (None, LegReport()):
        timings = ran(10.050).timings(LegReport(), decode, 10.2)
        assert (timings.second_token_ms, timings.exposed_transfer_ms, timings.first_decode_step_ms) == (0, 0, 0)


def test_tokens_that_come_together_share_their_time() -> None:
    stopwatch = Stopwatch(10.0)
    stopwatch.tokens_out(3, 10.05)
    timings = stopwatch.timings(None, LegReport(), 10.2)
    assert timings.ttft_ms == timings.second_token_ms == pytest.approx(50)
