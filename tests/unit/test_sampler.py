"""What the sampler chooses, and from what."""

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.sampling_oracle import draw_by, log_softmax, probabilities

from kvrelay.engine.errors import Internal, KvrelayError
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import Sampler, SampleRow, splitmix64, uniform
from kvrelay.engine.step import Sampled
from kvrelay.kernels.sampling import distribution, draw

EOS = 7


def row(
    *, position: int = 5, choice: int = 0, num_choices: int = 1, num_output_tokens: int = 0, **sampling: Any
) -> SampleRow:
    return row_after([0] * (position - num_output_tokens), [0] * num_output_tokens, choice, num_choices, **sampling)


def row_after(prompt: Seq[int], output: Seq[int], choice: int = 0, num_choices: int = 1, **sampling: Any) -> SampleRow:
    params = SamplingParams(**{"max_tokens": 9, "seed": 1, **sampling})
    return SampleRow(params, range(choice, choice + num_choices), [*prompt, *output], len(prompt))


def with_seed(sample_row: SampleRow, seed: int) -> SampleRow:
    return replace(sample_row, sampling=replace(sample_row.sampling, seed=seed))


def random_logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int | KvrelayError]:
    """The first choice's token of each row."""
    results = Sampler([EOS]).sample(logits, rows)
    return [result if isinstance(result, KvrelayError) else result[0].token_id for result in results]


def sample_one(logits: list[float], sample_row: SampleRow) -> int | KvrelayError:
    (result,) = sample(torch.tensor([logits]), [sample_row])
    return result


def draw_many(logits: list[float], count: int, **sampling: Any) -> list[int]:
    rows = [row(position=i, **sampling) for i in range(count)]
    results = sample(torch.tensor([logits]).repeat(count, 1), rows)
    return [result for result in results if isinstance(result, int)]


def shares(tokens: list[int], vocab_size: int) -> list[float]:
    return [tokens.count(i) / len(tokens) for i in range(vocab_size)]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 1e-6, 9.9e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_chooses_the_largest(temperature: float) -> None:
    """C10: it must not overflow into blanks or NaN."""
    logits = [1.0, -100.0, 3e4, 2.9e4, -3e38]
    assert draw_many(logits, 50, temperature=temperature) == [2] * 50


def test_of_equal_largest_logits_the_lowest_id_wins() -> None:
    assert sample_one([1.0, 5.0, 5.0, 5.0], row(temperature=0.0)) == 1
    wide = torch.zeros(1, 100_000)
    wide[0, [333, 77_777]] = 2.0
    assert sample(wide, [row(temperature=0.0)]) == [333]


def test_samples_follow_the_softmax_of_the_scaled_logits() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits) / temperature, 0).tolist()
        assert shares(draw_many(logits, 4000, temperature=temperature), 4) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids() -> None:
    assert set(draw_many([1.0, 2.0, 2.0, 2.0, 0.0], 300, top_k=2)) == {1, 2}
    assert set(draw_many([1.0, 2.0, 2.0, 2.0, 0.0], 300, top_k=1)) == {1}
    assert set(draw_many([1.0, 1.0, 1.0], 300, top_k=99)) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_hold_p() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    for top_p, kept in [
        (1e-9, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.81, {0, 1, 2}),
        (0.999, {0, 1, 2, 3}),
    ]:
        assert set(draw_many(logits, 600, top_p=top_p)) == kept


def test_top_p_is_held_by_exactly_p() -> None:
    assert set(draw_many([1.0, 1.0], 200, top_p=0.5)) == {0}
    assert set(draw_many([1.0] * 4, 300, top_p=0.75)) == {0, 1, 2}
    assert set(draw_many([1.0] * 4, 300, top_p=0.76)) == {0, 1, 2, 3}


def test_top_p_counts_within_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draw_many(logits, 300, top_k=2, top_p=0.56)) == {0}  # 0.4 of 0.7 holds 0.57
    assert set(draw_many(logits, 300, top_p=0.56)) == {0, 1}


def test_min_p_keeps_what_is_not_too_far_below_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert set(draw_many(logits, 300, min_p=0.5)) == {0, 1}
    assert set(draw_many(logits, 300, min_p=1.0)) == {0}


def test_no_end_before_min_tokens() -> None:
    """C08: every end-of-sequence id and every stop id alike."""
    logits = [0.0, 1.0, 2.0, 8.0, 0.0, 0.0, 0.0, 9.0]
    params = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (3,)}
    assert [sample_one(logits, row(num_output_tokens=n, **params)) for n in range(4)] == [2, 2, EOS, EOS]
    assert EOS not in draw_many(logits, 100, min_tokens=3, ignore_eos=True)


def test_a_stop_id_outside_the_vocabulary_is_harmless() -> None:
    """D04: it must not reach a neighbour's logits, nor end the step."""
    logits = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    rows = [row(temperature=0.0, min_tokens=5, stop_token_ids=(2, 3, -1, 2**40)), row(temperature=0.0)]
    assert sample(logits, rows) == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, bad, 0.0], [9.0, 0.0, 0.0]])
    rows = [row(temperature=0.0), row(temperature=temperature), row(temperature=0.0)]
    results = sample(logits, rows)
    assert (results[0], results[2]) == (1, 0)
    assert isinstance(results[1], Internal)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}])
def test_a_row_left_without_a_token_fails_alone(sampling: dict[str, float]) -> None:
    everything = row(min_tokens=5, stop_token_ids=(0, 1), **sampling)
    results = sample(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), [everything, row(temperature=0.0)])
    assert isinstance(results[0], Internal)
    assert results[1] == 1


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e300])
def test_an_absurd_temperature_is_a_token_or_that_rows_error(temperature: float) -> None:
    result = sample_one([1.0, 2.0, -3.0], row(temperature=temperature))
    assert isinstance(result, Internal) or result in (0, 1, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_token_bad_word_never_comes(temperature: float) -> None:
    logits = [1.0, 9.0, 2.0, 8.0]
    found = {sample_one(logits, row(bad_word_ids=((1,), (3,)), temperature=temperature, seed=i)) for i in range(40)}
    assert found == ({2} if temperature == 0 else {0, 2})


def test_a_bad_word_is_kept_from_its_last_token_once_the_output_ends_with_the_rest() -> None:
    logits, words = [5.0, 1.0, 9.0, 0.0], ((0, 1, 2),)
    for output, expected in [([], 2), ([0], 2), ([1], 2), ([0, 1], 0), ([3, 0, 1], 0), ([0, 1, 3], 2), ([1, 0], 2)]:
        assert sample_one(logits, row_after([3], output, temperature=0.0, bad_word_ids=words)) == expected
    # One word may begin where another has.
    several = ((0, 1, 2), (1, 0), (1, 1, 1))
    assert sample_one(logits, row_after([3], [0, 1], temperature=0.0, bad_word_ids=several)) == 1


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    logits, words = [5.0, 1.0, 9.0], ((0, 1, 2),)
    assert sample_one(logits, row_after([0, 1], [], temperature=0.0, bad_word_ids=words)) == 2
    assert sample_one(logits, row_after([0], [1], temperature=0.0, bad_word_ids=words)) == 2


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1.0, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_nothing_brings_a_forbidden_token_back(penalty: float, temperature: float) -> None:
    """C10, E05: not a bias, and no penalty turns it into NaN, for itself or for a neighbour."""
    forbidden = row_after(
        [0],
        [1, 2],
        temperature=temperature,
        repetition_penalty=penalty,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        logit_bias=((2, 100.0), (EOS, 100.0)),
        bad_word_ids=((2,),),
        min_tokens=9,
        logprobs=8,
    )
    logits = torch.tensor([[0.5, -4.0, 3.0, 1.0, 0.0, 0.0, 0.0, 2.0]])
    changed = logits[0].clone()
    Sampler([EOS]).process(changed, forbidden)
    assert [i for i, x in enumerate(changed.tolist()) if not math.isfinite(x)] == [2, EOS]
    for seed in range(20):
        tokens = sample(logits.repeat(2, 1), [with_seed(forbidden, seed), row(temperature=0.0)])
        assert tokens[0] not in (2, EOS)
        assert isinstance(tokens[0], int)
        assert tokens[1] == 2


def test_extreme_logits_stay_numbers_under_every_penalty() -> None:
    for penalty in (5e-324, 1e-30, 0.5, 100.0):
        extreme = torch.tensor([3.4e38, -3.4e38, 0.0, 1e-40])
        penalised = row_after(
            [0, 1], [2, 3], repetition_penalty=penalty, presence_penalty=2.0, logit_bias=((0, 100.0),)
        )
        Sampler([]).process(extreme, penalised)
        assert extreme.isfinite().all()


def test_top_p_next_to_one_keeps_every_token_it_may() -> None:
    assert set(draw_many([0.0] * 8, 200, top_p=math.nextafter(1.0, 0.0))) == set(range(8))


def test_top_p_finds_the_same_tokens_among_few_as_among_many() -> None:
    logits = random_logits(5000)
    for top_p in (0.01, 0.3, 0.8, 0.99):
        params = SamplingParams(max_tokens=9, seed=1, top_p=top_p)
        expected = probabilities(logits.double().numpy(), params)
        weights = distribution(logits, draw_by(params))
        assert (weights > 0).tolist() == (expected > 0).tolist()


# --- choices ------------------------------------------------------------------------------------------------------


def test_choices_differ_and_each_is_what_it_is_alone() -> None:
    logits = torch.zeros(1, 1000)
    (together,) = Sampler([]).sample(logits.clone(), [row(choice=2, num_choices=6)])
    assert isinstance(together, tuple)
    tokens = [sampled.token_id for sampled in together]
    assert len(set(tokens)) == 6
    assert tokens == [sample_one([0.0] * 1000, row(choice=choice)) for choice in range(2, 8)]


def test_greedy_choices_are_all_the_same() -> None:
    (result,) = Sampler([]).sample(torch.tensor([[1.0, 2.0]]), [row(num_choices=3, temperature=0.0)])
    assert result == (Sampled(1),) * 3


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_logits_as_they_came() -> None:
    """C12: whatever bias, penalties, temperature and filters make of them."""
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0, 0.0]])
    shaped = row_after(
        [4, 1],
        [1],
        logprobs=2,
        temperature=0.3,
        top_k=1,
        min_p=0.5,
        logit_bias=((1, -100.0), (2, 50.0)),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        bad_word_ids=((3,),),
    )
    (result,) = Sampler([]).sample(logits.clone(), [shaped])
    assert isinstance(result, tuple)
    found = result[0].logprobs
    assert found is not None
    assert found.token_ids == (2, 1, 3)
    assert found.logprobs == pytest.approx(log_softmax(logits[0].double().numpy())[[2, 1, 3]].tolist(), abs=1e-6)


def test_each_choice_has_its_own_tokens_log_probability() -> None:
    (result,) = Sampler([]).sample(random_logits(1, 50), [row(num_choices=8, logprobs=3)])
    assert isinstance(result, tuple)
    for sampled in result:
        assert sampled.logprobs is not None
        assert sampled.logprobs.token_ids[0] == sampled.token_id
        assert len(sampled.logprobs.logprobs) == 4
    assert len({sampled.logprobs.token_ids[1:] for sampled in result if sampled.logprobs}) == 1


def test_only_rows_that_ask_have_log_probabilities() -> None:
    logits = random_logits(4, 50)
    logits[3, 0] = math.nan
    rows = [row(logprobs=0), row(), row(temperature=0.0, logprobs=5), row(logprobs=5)]
    results = Sampler([]).sample(logits, rows)
    sizes = [len(r[0].logprobs.token_ids) if isinstance(r, tuple) and r[0].logprobs else None for r in results]
    assert sizes == [1, None, 6, None]
    assert isinstance(results[3], Internal)


def test_a_token_is_drawn_by_where_a_number_falls_and_never_one_without_weight() -> None:
    weights = torch.tensor([0, 3, 0, 1, 0])
    assert draw(weights, [0.0, 0.74, 0.75, 1 - 2**-52]) == [1, 1, 3, 3]
    for total in (2**62, 2**62 - 1, 2**53 + 1):
        assert draw(torch.tensor([0, total, 0]), [0.0, 1 - 2**-52]) == [1, 1]


# --- random numbers -----------------------------------------------------------------------------------------------


def test_random_numbers_are_splitmix64() -> None:
    """The generator's published first outputs for seed 1234567."""
    state, found = 1234567, []
    for _ in range(3):
        found.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_random_numbers_are_fixed_and_differ_in_every_part() -> None:
    assert uniform(1, 0, 5) == uniform(1, 0, 5)
    drawn = {uniform(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(100)}
    assert len(drawn) == 10_000
    assert min(drawn) >= 0
    assert max(drawn) < 1
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.01)
    assert 0 <= uniform(-1, 0, 0) < 1
    assert 0 <= uniform(2**64 - 1, 2**31, 2**31) < 1
