"""The order of service: priority, arrival, and what a wait makes up for."""

import itertools

import pytest
from support.scheduling import make_sequence

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.ranking import Ranking
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence

AGEING = Ranking(60.0)
STRICT = Ranking(0.0)


def waiting(arrival: float, priority: int = 0, *, name: str = "a", choice: int = 0) -> Sequence:
    request = Request(
        key=RequestKey(name, 0),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1, seed=0),
        priority=priority,
        arrival=arrival,
        choice=choice,
    )
    return Sequence(request)


@pytest.mark.parametrize("ranking", [AGEING, STRICT])
def test_of_equal_priority_who_came_first_is_first(ranking) -> None:
    assert ranking.rank(waiting(1.0, name="z")) < ranking.rank(waiting(1.000001, name="a"))


@pytest.mark.parametrize("ranking", [AGEING, STRICT])
def test_of_equal_arrival_the_lower_priority_number_is_first(ranking) -> None:
    assert ranking.rank(waiting(5.0, -1)) < ranking.rank(waiting(5.0, 0)) < ranking.rank(waiting(5.0, 1))


@pytest.mark.parametrize(("waited_s", "is_first"), [(59.0, False), (60.0, False), (60.001, True), (3600.0, True)])
def test_a_wait_longer_by_the_ageing_makes_up_for_one_priority(waited_s, is_first) -> None:
    """G05. At exactly as much the priority decides."""
    low, high = waiting(100.0, 1), waiting(100.0 + waited_s, 0)
    assert (AGEING.rank(low) < AGEING.rank(high)) is is_first
    assert STRICT.rank(high) < STRICT.rank(low)


def test_each_priority_takes_as_long_again_to_make_up_for() -> None:
    low = waiting(0.0, 3)
    assert AGEING.rank(waiting(179.0)) < AGEING.rank(low) < AGEING.rank(waiting(181.0))


@pytest.mark.parametrize("ranking", [AGEING, STRICT, Ranking(1e6), Ranking(1e-9), Ranking(5e-324)])
@pytest.mark.parametrize("priority", [0, 100, -100, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_no_priority_is_so_large_that_an_arrival_is_lost_beside_it(ranking, priority) -> None:
    arrivals = [0.0, 1e-6, 1.0, 1e5, 1e5 + 1e-6, 1e9]
    ranks = [ranking.rank(waiting(arrival, priority)) for arrival in arrivals]
    assert ranks == sorted(set(ranks))


def test_no_two_sequences_share_a_rank() -> None:
    sequences = [
        waiting(arrival, priority, name=name, choice=choice)
        for arrival, priority, name, choice in itertools.product((0.0, 60.0), (0, 1), "ab", (0, 1))
    ]
    assert len({AGEING.rank(sequence) for sequence in sequences}) == len(sequences)


def test_only_a_lower_priority_that_ranks_below_may_be_displaced() -> None:
    """G05."""
    urgent = waiting(100.0, 0)
    assert AGEING.may_displace(urgent, waiting(50.0, 1))
    assert AGEING.may_displace(urgent, waiting(150.0, 1))
    assert not AGEING.may_displace(urgent, waiting(39.0, 1)), "it has waited longer by more than the ageing"
    assert STRICT.may_displace(urgent, waiting(39.0, 1))


@pytest.mark.parametrize("ranking", [AGEING, STRICT])
@pytest.mark.parametrize("priority", [0, -1])
def test_neither_equals_nor_the_more_urgent_are_displaced(ranking, priority) -> None:
    """G05: however late they came."""
    assert not ranking.may_displace(waiting(0.0, 0), waiting(1e9, priority, name="b"))


@pytest.mark.parametrize("ranking", [AGEING, STRICT])
def test_of_two_at_most_one_may_displace_the_other(ranking) -> None:
    sequences = [make_sequence([1], number=30 * i, priority=p) for i in range(6) for p in (-1, 0, 1)]
    for one, other in itertools.permutations(sequences, 2):
        assert not (ranking.may_displace(one, other) and ranking.may_displace(other, one))


@pytest.mark.parametrize("ageing_s", [-1.0, float("inf"), float("nan"), 2e6])
def test_an_ageing_that_is_no_time_is_refused_by_name(ageing_s) -> None:
    with pytest.raises(ConfigError, match="priority_ageing_s"):
        EngineConfig(priority_ageing_s=ageing_s)
