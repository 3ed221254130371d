"""What a load consists of: lengths, prompts, arrivals."""

import itertools
import random
import statistics

import pytest

from kvrelay.cli.bench_workload import Lengths, Workload, parse_lengths, poisson_arrivals
from kvrelay.engine.errors import ConfigError


def make_workload(**options: object) -> Workload:
    given = {"input_lengths": Lengths("fixed", 20), "output_lengths": Lengths("fixed", 8)} | options
    return Workload(**{"seed": 0, "vocabulary": range(100), "max_model_len": 128} | given)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Lengths("fixed", 512)),
        ("uniform:3:9", Lengths("uniform", 3, high=9)),
        ("lognormal:512:0.5", Lengths("lognormal", 512, cv=0.5)),
    ],
)
def test_lengths_are_read_from_text(text: str, lengths: Lengths) -> None:
    assert parse_lengths("input_len", text) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-1",
        "1.5",
        "uniform:3",
        "uniform:9:3",
        "uniform:0:3",
        "lognormal:9:nan",
        "lognormal:9:-1",
        "zipf:9",
    ],
)
def test_lengths_that_make_no_sense_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^input_len = '{text}'"):
        parse_lengths("input_len", text)


def test_uniform_lengths_reach_both_ends_and_nothing_beyond() -> None:
    rng = random.Random(1)
    assert {Lengths("uniform", 3, high=6).draw(rng) for _ in range(200)} == {3, 4, 5, 6}


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0])
def test_lognormal_lengths_have_their_mean_and_their_variation(cv: float) -> None:
    rng = random.Random(1)
    drawn = [Lengths("lognormal", 500, cv=cv).draw(rng) for _ in range(10_000)]
    assert statistics.fmean(drawn) == pytest.approx(500, rel=0.03)
    assert statistics.pstdev(drawn) / statistics.fmean(drawn) == pytest.approx(cv, rel=0.06)


def test_a_prompt_is_the_same_whenever_it_is_asked_for() -> None:
    lengths = {"input_lengths": Lengths("uniform", 1, high=50), "output_lengths": Lengths("lognormal", 9, cv=1.0)}
    first, second = make_workload(**lengths), make_workload(**lengths)
    forth = [first.prompt(i) for i in range(10)]
    assert [second.prompt(i) for i in reversed(range(10))] == forth[::-1]
    assert len({prompt.token_ids for prompt in forth}) == 10
    assert make_workload(**lengths, seed=1).prompt(0) != forth[0]


def test_a_warm_up_has_prompts_of_its_own() -> None:
    workload = make_workload()
    assert workload.prompt(-1).token_ids not in {workload.prompt(i).token_ids for i in range(10)}


def test_prompts_come_from_the_vocabulary_alone() -> None:
    workload = make_workload(vocabulary=[7, 9], input_lengths=Lengths("fixed", 100))
    assert set(workload.prompt(0).token_ids) == {7, 9}


def test_prefixes_are_shared_and_come_on_top_of_the_prompt() -> None:
    workload = make_workload(num_prefixes=3, prefix_len=16)
    prompts = [workload.prompt(i).token_ids for i in range(50)]
    assert {len(prompt) for prompt in prompts} == {36}
    assert len({prompt[:16] for prompt in prompts}) == 3
    assert len({prompt[16:] for prompt in prompts}) == 50


@pytest.mark.parametrize("lengths", [Lengths("fixed", 100), Lengths("uniform", 1, high=100)])
def test_what_cannot_fit_into_the_context_is_refused_with_the_numbers(lengths: Lengths) -> None:
    with pytest.raises(ConfigError, match="up to 129 tokens in and out: the model's context has 128"):
        make_workload(input_lengths=lengths, output_lengths=Lengths("fixed", 13), prefix_len=16)


def test_a_long_tail_is_cut_to_the_context() -> None:
    lengths = {"input_lengths": Lengths("lognormal", 60, cv=2.0), "output_lengths": Lengths("lognormal", 60, cv=2.0)}
    workload = make_workload(**lengths, prefix_len=8)
    prompts = [workload.prompt(i) for i in range(200)]
    totals = [len(prompt.token_ids) + prompt.max_tokens for prompt in prompts]
    assert max(totals) == 128
    assert min(prompt.max_tokens for prompt in prompts) == 1


def test_arrivals_are_a_poisson_process_of_the_given_rate() -> None:
    arrivals = list(itertools.islice(poisson_arrivals(4.0, seed=3), 10_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.03)  # burstiness 1
    counts = [0] * 2500  # of each second: mean and variance are equal
    for arrival in arrivals:
        counts[min(int(arrival), 2499)] += 1
    assert statistics.pvariance(counts[:2400]) == pytest.approx(4, rel=0.1)
    assert next(poisson_arrivals(4.0, seed=3)) == arrivals[0] != next(poisson_arrivals(4.0, seed=4))
