"""What is bounded at the router's door, and what those that find no room are told."""

import pytest

from kvrelay.engine.clock import FakeClock
from kvrelay.engine.errors import ResourceExhausted, Unavailable
from kvrelay.router.admission import MAX_RETRY_S, MIN_RETRY_S, Admission, Crowd


def hint(admission: Admission) -> float:
    """What a request is told that finds no room, in figures and in words."""
    with pytest.raises(ResourceExhausted) as caught, admission.admit_request():
        raise AssertionError("it was let in")
    assert caught.value.message.endswith(f"already; try again in {caught.value.retry_s:.1f} s")
    return caught.value.retry_s


def test_a_request_waits_until_its_first_output_and_runs_from_then_on() -> None:
    clock = FakeClock()
    admission = Admission(10, lambda: 2, clock)
    with admission.admit_request() as first, admission.admit_request():
        assert (admission.num_waiting, admission.num_requests) == (2, 2)
        clock.advance(3.0)
        assert hint(admission) == 3.0
        first.begin()
        first.begin()
        assert (admission.num_waiting, admission.num_requests) == (1, 2)
        with admission.admit_request():
            hint(admission)
    assert (admission.num_waiting, admission.num_requests, admission.num_refused) == (0, 0, 2)


def test_whatever_ends_a_request_while_it_waits_frees_its_place() -> None:
    admission = Admission(10, lambda: 1, FakeClock())
    for error in (KeyError, GeneratorExit, Unavailable):
        with pytest.raises(error), admission.admit_request():
            raise error("whatever")
    with admission.admit_request():
        assert (admission.num_waiting, admission.num_requests) == (1, 1)


def test_how_many_may_wait_goes_with_the_nodes_that_are_there() -> None:
    limit = [1]
    admission = Admission(10, lambda: limit[0], FakeClock())
    with admission.admit_request():
        hint(admission)
        limit[0] = 2
        with admission.admit_request():
            limit[0] = 1
            hint(admission)


def test_all_calls_have_a_limit_together_however_many_may_wait() -> None:
    admission = Admission(2, lambda: 10, FakeClock())
    with admission.admit(), admission.admit_request():
        hint(admission)
        with pytest.raises(ResourceExhausted), admission.admit():
            raise AssertionError("it was let in")
    with admission.admit(), admission.admit():
        pass


async def test_nobody_enters_a_router_that_drains() -> None:
    admission = Admission(2, lambda: 2, FakeClock())
    await admission.drain()
    for enter in (admission.admit, admission.admit_request):
        with pytest.raises(Unavailable), enter():
            raise AssertionError("it was let in")
    assert admission.num_refused == 0


def test_the_hint_is_when_half_of_the_places_will_be_free_at_the_rate_of_late() -> None:
    clock = FakeClock()
    crowd = Crowd(clock)
    for _ in range(40):
        crowd.enter()
    for _ in range(1000):  # ten a second
        clock.advance(0.1)
        crowd.leave(was_served=True)
        crowd.enter()
    assert crowd.retry_s() == pytest.approx(20 / 10, rel=0.05)
    for _ in range(1000):  # four a second: what was before is forgotten
        clock.advance(0.25)
        crowd.leave(was_served=True)
        crowd.enter()
    assert crowd.retry_s() == pytest.approx(20 / 4, rel=0.05)


def test_in_a_standstill_the_hint_grows_and_has_an_end() -> None:
    clock = FakeClock()
    crowd = Crowd(clock)
    for _ in range(8):
        crowd.enter()
    assert crowd.retry_s() == MIN_RETRY_S
    hints = []
    for _ in range(20):
        clock.advance(1.0)
        hints.append(crowd.retry_s())
    assert hints[:3] == [4.0, 8.0, 12.0]
    assert hints[-1] == MAX_RETRY_S


def test_who_leaves_unserved_makes_nobody_look_fast() -> None:
    clock = FakeClock()
    crowd = Crowd(clock)
    for _ in range(4):
        crowd.enter()
    clock.advance(2.0)
    for _ in range(100):
        crowd.enter()
        crowd.leave(was_served=False)
    assert crowd.retry_s() == 4.0


def test_time_with_nobody_inside_does_not_count() -> None:
    clock = FakeClock()
    crowd = Crowd(clock)
    for _ in range(100):
        crowd.enter()
        clock.advance(0.01)
        crowd.leave(was_served=True)
    clock.advance(3600.0)
    for _ in range(10):
        crowd.enter()
    clock.advance(0.1)
    crowd.leave(was_served=True)
    crowd.enter()
    assert crowd.retry_s() == pytest.approx(5 * 0.1 / 2)
