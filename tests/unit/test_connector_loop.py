"""The thread that waits: order, timers, and what survives a callback that raises."""

import os
import threading

import pytest
import zmq
from support.connector import SteppedClock, wait_until

from kvrelay.connector.base import RefuseReason, Released
from kvrelay.connector.events import MAX_CLOSED, ClosedTransfers, EventQueue
from kvrelay.connector.loop import Loop
from kvrelay.engine.clock import FakeClock, MonotonicClock
from kvrelay.engine.request import RequestKey


@pytest.fixture
def clock():
    return SteppedClock()


@pytest.fixture
def loop(clock):
    loop = Loop("kv-test", clock)
    clock.connectors.append(loop)
    loop.start()
    yield loop
    assert loop.stop(20)


def test_posted_calls_run_in_order_on_the_loops_thread(loop):
    seen, done = [], threading.Event()
    for i in range(100):
        loop.post(lambda i=i: seen.append((i, threading.current_thread().name)))
    loop.post(done.set)
    assert done.wait(20)
    assert seen == [(i, "kv-test") for i in range(100)]


def test_a_call_posted_by_a_call_runs_after_it(loop):
    seen, done = [], threading.Event()
    loop.post(lambda: (loop.post(lambda: (seen.append(2), done.set())), seen.append(1)))
    assert done.wait(20)
    assert seen == [1, 2]


def test_timers_run_when_due_in_order_and_not_when_cancelled(loop, clock):
    seen = []
    loop.call_in(2.0, lambda: seen.append("late"))
    loop.call_in(1.0, lambda: seen.append("early"))
    loop.call_in(1.5, lambda: seen.append("cancelled")).cancel()
    clock.advance(0.999)
    barrier(loop)
    assert seen == []
    clock.advance(0.001)
    wait_until(lambda: seen == ["early"])
    clock.advance(5.0)
    wait_until(lambda: seen == ["early", "late"])


def barrier(loop):
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(20)


def test_a_real_clock_fires_a_timer_without_any_other_event():
    loop, done = Loop("kv-test", MonotonicClock()), threading.Event()
    loop.start()
    loop.call_in(0.02, done.set)
    assert done.wait(20)
    assert loop.stop(20)


def test_cancelled_timers_do_not_pile_up():
    loop = Loop("kv-test", FakeClock())
    for _ in range(10_000):
        loop.call_in(3600.0, lambda: None).cancel()
    assert len(loop._timers) < 2_000
    loop.start()
    assert loop.stop(20)


def test_a_callback_that_raises_is_logged_and_fails_nothing_else(loop, caplog):
    done = threading.Event()
    loop.post(lambda: 1 / 0)
    loop.call_in(0.0, lambda: 1 / 0)
    loop.post(done.set)
    assert done.wait(20)
    wait_until(lambda: [r.message for r in caplog.records] == ["callback_failed"] * 2)


def test_a_watched_descriptor_is_read_until_it_is_unwatched(loop):
    read, write = os.pipe()
    seen = []
    loop.post(lambda: loop.watch(read, zmq.POLLIN, lambda: seen.append(os.read(read, 1))))
    os.write(write, b"a")
    wait_until(lambda: seen == [b"a"])
    loop.post(lambda: loop.unwatch(read))
    barrier(loop)
    os.write(write, b"b")
    barrier(loop)
    assert seen == [b"a"]
    os.close(read)
    os.close(write)


def test_a_loop_that_has_ended_takes_calls_and_closes_its_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    loop = Loop("kv-test", FakeClock())
    loop.start()
    assert loop.stop(20)
    loop.post(lambda: None)
    loop.wake()
    assert loop.stop(0)
    assert len(os.listdir("/proc/self/fd")) <= before


# --- what waits for the engine ---


def test_events_are_taken_once_in_order_and_can_be_taken_back():
    woken = []
    queue = EventQueue(lambda: woken.append(1))
    events = [Released(RequestKey(name, 0)) for name in "abc"]
    for event in events:
        queue.put(event)
    queue.discard(events[1])
    assert queue.take() == [events[0], events[2]]
    assert queue.take() == []
    assert len(woken) == 3


def test_closed_transfers_are_remembered_up_to_a_limit_the_oldest_going_first():
    closed = ClosedTransfers()
    for i in range(MAX_CLOSED + 10):
        closed.add(RequestKey(str(i), 0), RefuseReason.UNKNOWN)
    assert closed.get(RequestKey("9", 0)) is None
    assert closed.get(RequestKey("10", 0)) is RefuseReason.UNKNOWN
    assert closed.get(RequestKey(str(MAX_CLOSED + 9), 0)) is RefuseReason.UNKNOWN
