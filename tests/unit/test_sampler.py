"""What the sampler chooses, and from what."""

import math
from typing import Any

import pytest
import torch

from kvrelay.engine.errors import Internal, KvrelayError
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import Sampler, SampleRow, splitmix64, uniform

EOS = 7


def row(*, position: int = 5, choice: int = 0, num_output_tokens: int = 0, **sampling: Any) -> SampleRow:
    token_ids = [0] * position
    params = SamplingParams(**{"max_tokens": 9, "seed": 1, **sampling})
    return SampleRow(params, choice, token_ids, len(token_ids) - num_output_tokens)


def sample_one(logits: list[float], sample_row: SampleRow) -> int | KvrelayError:
    (result,) = Sampler([EOS]).sample(torch.tensor([logits]), [sample_row])
    return result


def draw_many(logits: list[float], count: int, **sampling: Any) -> list[int]:
    rows = [row(position=i, **sampling) for i in range(count)]
    results = Sampler([EOS]).sample(torch.tensor([logits]).repeat(count, 1), rows)
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
    assert Sampler([]).sample(wide, [row(temperature=0.0)]) == [333]


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
    assert Sampler([]).sample(logits, rows) == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, bad, 0.0], [9.0, 0.0, 0.0]])
    rows = [row(temperature=0.0), row(temperature=temperature), row(temperature=0.0)]
    results = Sampler([]).sample(logits, rows)
    assert (results[0], results[2]) == (1, 0)
    assert isinstance(results[1], Internal)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}])
def test_a_row_left_without_a_token_fails_alone(sampling: dict[str, float]) -> None:
    everything = row(min_tokens=5, stop_token_ids=(0, 1), **sampling)
    results = Sampler([]).sample(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), [everything, row(temperature=0.0)])
    assert isinstance(results[0], Internal)
    assert results[1] == 1


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e300])
def test_an_absurd_temperature_is_a_token_or_that_rows_error(temperature: float) -> None:
    result = sample_one([1.0, 2.0, -3.0], row(temperature=temperature))
    assert isinstance(result, Internal) or result in (0, 1, 2)


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
