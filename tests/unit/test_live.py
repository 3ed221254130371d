"""What the live page is told: bounded, whole, and the same through changes as through snapshots."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kvrelay.engine.clock import FakeClock, MonotonicClock
from kvrelay.engine.errors import ResourceExhausted
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import HandoffReport, Load
from kvrelay.engine.request import FinishReason, Request, RequestKey, SamplingParams
from kvrelay.router import live
from kvrelay.router.api import Handoff, Output, Summary, Timings, Usage
from kvrelay.router.live import Change, LiveFeed, Snapshot, changes
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.node_statistics import BlockStatistics, NodeStatistics
from kvrelay.router.policy import Placement
from kvrelay.router.registry import Registry

TIMINGS = Timings(
    ttft_ms=3,
    route_ms=1,
    prefill_queue_ms=0,
    prefill_ms=1,
    first_token_out_ms=1,
    second_token_ms=5,
    exposed_transfer_ms=1,
    decode_queue_ms=0,
    first_decode_step_ms=1,
    total_ms=9,
)
HANDOFF = Handoff(
    report=HandoffReport(kv_bytes=4096, kv_blocks=2, cached_blocks=0, grant_ms=1, transfer_ms=2, transport="shm"),
    prefill_node="P",
    decode_node="D",
)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def facts(role: Role, name: str) -> NodeFacts:
    return NodeFacts(
        role=role,
        epoch=f"epoch-{name}",
        name=name,
        version="1",
        model_fingerprint="f",
        kv_layout=LAYOUT,
        max_model_len=100,
        num_blocks=10,
        max_num_seqs=4,
        grpc_address="",
    )


def request(number: int, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=9, seed=0)
    return Request(key=RequestKey(f"r-{number}", 0), prompt_token_ids=(1, 2, 3), sampling=sampling, **more)


class Feed:
    """A feed, and a way to live a request's life on it."""

    def __init__(self, clock: Any = None) -> None:
        self.clock = clock or FakeClock()
        self.registry = Registry(8)
        self.registry.add(facts(Role.PREFILL, "P"))
        self.registry.add(facts(Role.DECODE, "D"))
        prefill, decode = self.registry
        self.pair = Placement(prefill, decode, 3)
        self.feed = LiveFeed(self.registry, self.clock)

    def start(self, number: int, placement: Placement | None = None) -> None:
        self.feed.started(request(number), placement or self.pair, None)

    def say(self, number: int, num_tokens: int = 1) -> None:
        self.feed.output(request(number), Output(choice=0, token_ids=(5,) * num_tokens), self.clock.now())

    def finish(self, number: int) -> None:
        usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
        summary = Summary(usage=usage, timings=TIMINGS, handoff=HANDOFF)
        last = Output(choice=0, token_ids=(5,), finish_reason=FinishReason.STOP, summary=summary)
        self.feed.output(request(number), last, self.clock.now())
        self.end(number, "stop")

    def end(self, number: int, outcome: str) -> None:
        self.feed.ended(request(number), outcome, TIMINGS, self.clock.now())


def apply(old: Snapshot, change: Change) -> Snapshot:
    """As the page does it."""

    def applied(entries: Any, changed: Any) -> dict[str, Any]:
        return {name: entry for name, entry in {**entries, **changed}.items() if entry is not None}

    return replace(
        old,
        now_s=change.now_s,
        nodes=applied(old.nodes, change.nodes),
        requests=applied(old.requests, change.requests),
        totals=change.totals,
    )


def test_a_finished_request_has_its_pair_its_tokens_its_times_and_its_handoff() -> None:
    feed = Feed()
    feed.start(1)
    feed.clock.advance(2)
    feed.say(1)
    feed.clock.advance(3)
    feed.finish(1)
    (shown,) = feed.feed.snapshot().requests.values()
    assert (shown.prefill, shown.decode, shown.num_prompt_tokens, shown.num_cached_tokens) == ("P", "D", 3, 1)
    assert (shown.num_tokens, shown.first_s, shown.ended_s, shown.outcome) == (2, 2, 5, "stop")
    assert (shown.timings, shown.handoff) == (TIMINGS, HANDOFF)
    assert feed.feed.snapshot().totals == live.Totals(num_finished=1, num_tokens=2, num_kv_bytes=4096)


@pytest.mark.parametrize(("outcome", "count_of"), [("LEFT", "num_left"), ("UNAVAILABLE", "num_failed")])
def test_a_request_that_was_cancelled_or_failed_ends_its_bar(outcome: str, count_of: str) -> None:
    feed = Feed()
    feed.start(1)
    assert feed.feed.snapshot().totals.num_running == 1
    feed.end(1, outcome)
    snapshot = feed.feed.snapshot()
    assert [(shown.ended_s, shown.outcome) for shown in snapshot.requests.values()] == [(0, outcome)]
    assert (snapshot.totals.num_running, getattr(snapshot.totals, count_of)) == (0, 1)


def test_a_request_that_found_no_place_is_shown_as_one_that_ended() -> None:
    feed = Feed()
    feed.end(1, "UNAVAILABLE")
    snapshot = feed.feed.snapshot()
    assert [(shown.decode, shown.outcome) for shown in snapshot.requests.values()] == [("", "UNAVAILABLE")]
    assert (snapshot.totals.num_running, snapshot.totals.num_failed) == (0, 1)


def test_a_request_that_goes_on_elsewhere_keeps_its_bar() -> None:
    feed = Feed()
    feed.start(1)
    feed.start(1, Placement(None, feed.pair.decode, 3))
    snapshot = feed.feed.snapshot()
    assert [(shown.prefill, shown.decode) for shown in snapshot.requests.values()] == [("", "D")]
    assert snapshot.totals.num_running == 1


def test_the_ended_make_room_for_new_ones_and_the_running_never_do() -> None:
    feed = Feed()
    feed.start(0)
    for number in range(1, live.MAX_LIVES + 10):
        feed.start(number)
        feed.end(number, "stop")
    shown = feed.feed.snapshot().requests
    assert len(shown) == live.MAX_LIVES
    assert [number for number, life in shown.items() if not life.outcome] == ["1"]
    assert list(shown)[1:] == [str(number) for number in range(12, live.MAX_LIVES + 11)]


def test_running_requests_beyond_the_limit_are_counted_and_not_kept() -> None:
    feed = Feed()
    for number in range(live.MAX_LIVES + 5):
        feed.start(number)
    for number in range(live.MAX_LIVES + 5):
        feed.say(number)
    snapshot = feed.feed.snapshot()
    assert len(snapshot.requests) == live.MAX_LIVES
    assert (snapshot.totals.num_running, snapshot.totals.num_tokens) == (live.MAX_LIVES + 5,) * 2
    for number in range(live.MAX_LIVES + 5):
        feed.end(number, "stop")
    snapshot = feed.feed.snapshot()
    assert len(snapshot.requests) == live.MAX_LIVES
    assert (snapshot.totals.num_running, snapshot.totals.num_finished) == (0, live.MAX_LIVES + 5)


def test_a_lost_node_vanishes_and_a_changed_one_is_told_alone() -> None:
    feed = Feed()
    before = feed.feed.snapshot()
    assert not changes(before, feed.feed.snapshot())
    feed.registry.report("epoch-P", Load(num_free_blocks=4))
    feed.registry.remove("epoch-D")
    change = changes(before, feed.feed.snapshot())
    assert change.nodes["epoch-D"] is None
    node = change.nodes["epoch-P"]
    assert node is not None
    assert (node.num_blocks, node.num_free, node.num_held) == (10, 4, 6)


def test_a_pool_adds_up_though_load_and_statistics_are_of_two_moments() -> None:
    feed = Feed()
    blocks = BlockStatistics(total=10, free=0, cached=6, held=2, quarantined=2)
    feed.registry.keep_statistics("epoch-D", NodeStatistics(blocks=blocks), 0)
    for num_free, expected in ((6, (0, 6, 2, 2)), (4, (0, 4, 4, 2)), (9, (3, 6, 0, 1)), (99, (4, 6, 0, 0))):
        feed.registry.report("epoch-D", Load(num_free_blocks=num_free))
        node = feed.feed.snapshot().nodes["epoch-D"]
        assert (node.num_free, node.num_cached, node.num_held, node.num_quarantined) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["start", "say", "finish", "fail", "look", "lose"]), st.integers(0, 7))))
def test_changes_applied_one_after_another_are_the_snapshot(steps: list[tuple[str, int]]) -> None:
    """With so little room that requests come, go and are replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "MAX_LIVES", 4)
        feed, running, numbers = Feed(), dict[int, int](), count()
        seen = page = Snapshot()
        for step, which in steps:
            feed.clock.advance(0.25)
            number = running.get(which)
            if step == "start" and number is None:
                running[which] = next(numbers)
                feed.start(running[which])
            elif step == "say" and number is not None:
                feed.say(number, 2)
            elif step in ("finish", "fail") and number is not None:
                del running[which]
                feed.finish(number) if step == "finish" else feed.end(number, "LEFT")
            elif step == "lose":
                feed.registry.remove("epoch-D" if which else "epoch-P")
            elif step == "look":
                page = apply(page, changes(seen, seen := feed.feed.snapshot()))
                assert page == seen
            snapshot = feed.feed.snapshot()
            assert len(snapshot.requests) <= 4
            assert snapshot.totals.num_running == len(running)
            arrivals = [int(number) for number in snapshot.requests]
            assert arrivals == sorted(arrivals)
        assert apply(page, changes(seen, feed.feed.snapshot())) == feed.feed.snapshot()


async def test_a_watcher_that_takes_long_gets_the_newest_state_and_nothing_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.001)
    feed = Feed(MonotonicClock())
    async with aclosing(feed.feed.watch()) as watched:
        first = await anext(watched)
        assert first is not None
        assert set(first.nodes) == {"epoch-P", "epoch-D"}
        feed.start(1)
        for _ in range(1000):
            feed.say(1)
        change = await asyncio.wait_for(anext(watched), 5)
        assert change is not None
        assert [shown and shown.num_tokens for shown in change.requests.values()] == [1000]


async def test_while_nothing_changes_a_watcher_gets_signs_of_life_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK_S", "_POLL_S", "_HEARTBEAT_S"):
        monkeypatch.setattr(live, name, 0.001)
    feed = Feed(MonotonicClock())
    async with aclosing(feed.feed.watch()) as watched:
        assert await anext(watched)
        assert await asyncio.wait_for(anext(watched), 5) is None


async def test_watchers_are_bounded_and_leave_nothing_behind() -> None:
    feed = Feed(MonotonicClock())
    watchers = [feed.feed.watch() for _ in range(live.MAX_WATCHERS)]
    for watcher in watchers:
        await anext(watcher)
    with pytest.raises(ResourceExhausted):
        await anext(feed.feed.watch())
    await watchers[0].aclose()
    late = feed.feed.watch()
    await anext(late)
    for watcher in (*watchers, late):
        await watcher.aclose()
    assert not feed.feed._watchers


async def test_gaps_between_tokens_are_measured_while_somebody_watches() -> None:
    feed = Feed()
    feed.start(1)
    feed.say(1)
    feed.clock.advance(5)
    feed.say(1)
    assert feed.feed.snapshot().totals.itl_p50_ms is None
    async with aclosing(feed.feed.watch()) as watched:
        await anext(watched)
        feed.say(1)
        for _ in range(3):
            feed.clock.advance(0.02)
            feed.say(1)
        assert feed.feed.snapshot().totals.itl_p50_ms == pytest.approx(20)
