"""Log-probabilities: right, finite, of the first of equals, and each row's own."""

import math
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from support.sampling_oracle import likeliest_first, log_softmax

from kvrelay.engine import logprobs
from kvrelay.engine.request import Logprobs
from kvrelay.kernels.reference import ReferenceKernels
from kvrelay.kernels.sampling import likeliest, weigh, weight_of_one

FLOAT32_MAX = 3.4028234663852886e38


def token_logprobs(logits: torch.Tensor, chosen: Seq[Seq[int]], counts: Seq[int]) -> list[tuple[Logprobs, ...] | None]:
    return logprobs.token_logprobs(logits, chosen, counts, ReferenceKernels())


def of_one(logits: list[float], token_id: int, num_likeliest: int) -> Logprobs:
    (found,) = token_logprobs(torch.tensor([logits]), [(token_id,)], [num_likeliest])
    assert found is not None
    return found[0]


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def test_the_token_asked_for_comes_first_and_then_the_likeliest() -> None:
    found = of_one([1.0, 3.0, 2.0, 0.0], 3, 2)
    assert found.token_ids == (3, 1, 2)
    total = sum(math.exp(x) for x in (1, 3, 2, 0))
    assert found.logprobs == pytest.approx([x - math.log(total) for x in (0, 3, 2)], rel=1e-6)
    assert of_one([1.0, 3.0, 2.0, 0.0], 1, 1).token_ids == (1, 1)


def test_none_of_the_likeliest_is_a_legal_number_and_so_are_more_than_there_are() -> None:
    assert of_one([1.0, 3.0], 0, 0).token_ids == (0,)
    assert of_one([1.0, 3.0], 0, 99).token_ids == (0, 1, 0)


def test_of_equals_the_lower_ids_come_first_also_where_the_last_place_is_shared() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4000, 17, 3999]] = 1.0
    logits[1, [9, 8]] = -0.0  # equal to 0.0
    logits[2] = torch.arange(5000) // 3
    found = likeliest(logits, 5).tolist()
    assert found == [[17, 3999, 4000, 0, 1], [0, 1, 2, 3, 4], [4998, 4999, 4995, 4996, 4997]]
    assert likeliest(torch.full((2, 70), -math.inf), 3).tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("count", [1, 2, 20, 331])
def test_the_likeliest_are_those_of_a_plain_sort(count: int) -> None:
    logits = random_logits(19, 331).bfloat16().float()  # rounded, so that many are equal
    expected = [likeliest_first(row)[:count] for row in logits.double().numpy()]
    assert likeliest(logits, count).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 2, 331, 49_152, 262_144])
def test_values_are_those_of_a_float64_log_softmax(vocab_size: int) -> None:
    logits = random_logits(2, vocab_size)
    found = token_logprobs(logits, [(0,), (vocab_size - 1,)], [20, 20])
    for row, result in zip(logits.double().numpy(), found, strict=True):
        assert result is not None
        expected = log_softmax(row)[list(result[0].token_ids)]
        np.testing.assert_allclose(result[0].logprobs, expected, rtol=2e-7, atol=2e-7)


def test_values_are_float32_finite_and_never_above_zero() -> None:
    """C12: the model's own distribution, so there is no -inf to make finite but where float32 ends."""
    logits = [FLOAT32_MAX, -FLOAT32_MAX, 0.0]
    found = of_one(logits, 1, 3)
    assert found == Logprobs((1, 0, 2, 1), (-FLOAT32_MAX, 0.0, -FLOAT32_MAX, -FLOAT32_MAX))
    ((result,),) = (rows for rows in token_logprobs(random_logits(1, 999), [(5,)], [999]) if rows is not None)
    assert all(value == float(np.float32(value)) and -FLOAT32_MAX <= value <= 0 for value in result.logprobs)


def test_a_rows_bits_are_the_same_alone_in_a_batch_in_pieces_and_with_any_number_of_threads() -> None:
    logits = random_logits(37, 49_153)
    chosen, counts = [(i * 1000,) for i in range(37)], [i % 7 for i in range(37)]
    together = token_logprobs(logits, chosen, counts)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert token_logprobs(logits, chosen, counts) == together
        alone = [token_logprobs(logits[i : i + 1], chosen[i : i + 1], counts[i : i + 1])[0] for i in range(0, 37, 4)]
        assert alone == together[::4]
    torch.set_num_threads(before)
    pieces = [slice(0, 1), slice(1, 18), slice(18, 37)]
    assert [row for piece in pieces for row in token_logprobs(logits[piece], chosen[piece], counts[piece])] == together


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_none_and_changes_no_other(bad: float) -> None:
    logits = random_logits(5, 700)
    expected = token_logprobs(logits, [(1, 2)] * 5, [3] * 5)
    logits[2, 699] = bad
    assert token_logprobs(logits, [(1, 2)] * 5, [3] * 5) == [*expected[:2], None, *expected[3:]]


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 49_152, 2**18])
def test_weights_add_up_without_overflow(vocab_size: int) -> None:
    weights = weigh(torch.zeros(vocab_size))
    assert int(weights.sum()) == vocab_size * weight_of_one(vocab_size) <= 2**62
    assert weigh(torch.tensor([0.0, -math.inf, -1e30])).tolist() == [weight_of_one(3), 0, 0]
