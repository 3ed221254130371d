"""A row's tokens and log-probabilities do not depend on the rows beside it, and are what its parameters ask for."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import sampling_oracle as oracle

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.request import Logprobs, SamplingParams
from kvrelay.engine.sampler import GREEDY_TEMPERATURE, Sampler, SampleRow
from kvrelay.engine.step import Sampled
from kvrelay.kernels.sampling import distribution

VOCAB_SIZE = 12
EOS = 3

tokens = st.integers(0, VOCAB_SIZE - 1)
rows = st.builds(
    SampleRow,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.just(20),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=st.integers(0, 4),
        temperature=st.sampled_from([0.0, 5e-324, 1e-12, 1e-7, 1e-5, 1e-4, 0.3, 1.0, 2.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 1000]),
        top_p=st.sampled_from([1.0, 0.999, 0.5, 1e-6]),
        min_p=st.sampled_from([0.0, 0.01, 0.7, 1.0]),
        stop_token_ids=st.sampled_from([(), (0,), (5, 900), tuple(range(VOCAB_SIZE))]),
        logit_bias=st.sampled_from([(), ((0, 3.5),), ((4, -100.0), (5, 100.0), (11, 0.25)), ((3, 100.0),)]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5, 100.0, 0.01]),
        presence_penalty=st.sampled_from([0.0, 1.25, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
        bad_word_ids=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
        logprobs=st.sampled_from([None, None, 0, 1, 5, 100]),
    ),
    choices=st.builds(lambda first, count: range(first, first + count), st.integers(0, 3), st.integers(1, 4)),
    token_ids=st.lists(tokens, min_size=5, max_size=60),
    num_prompt_tokens=st.integers(0, 5),
)

Result = tuple[Sampled, ...] | str


def random_logits(seed: int, count: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, vocab_size, generator=generator)
    return logits.mul_(4).round_().div_(4)  # so that some are equal


def sample(logits: torch.Tensor, batch: list[SampleRow]) -> list[Result]:
    results = Sampler([EOS]).sample(logits.clone(), batch)
    return [result.message if isinstance(result, KvrelayError) else result for result in results]


def check_logprobs(found: Logprobs, token_id: int, logits: np.ndarray[Any, Any], count: int) -> None:
    """The chosen token first, then the likeliest, of the logits as they came."""
    assert found.token_ids == (token_id, *oracle.likeliest_first(logits)[:count])
    assert all(math.isfinite(value) for value in found.logprobs)
    np.testing.assert_allclose(found.logprobs, oracle.log_softmax(logits)[list(found.token_ids)], atol=1e-5)


def check_row(result: Result, logits: np.ndarray[Any, Any], row: SampleRow) -> None:
    """What a row gave is what the float64 reference allows."""
    params = row.sampling
    if not np.isfinite(logits).all():
        assert result == "the model's logits are not finite"
        return
    scores = oracle.processed(logits, row, [EOS])
    if scores.max() == -math.inf:
        assert result == "the sampling parameters leave no token to choose"
        return
    assert isinstance(result, tuple)
    assert len(result) == len(row.choices)
    if params.temperature < GREEDY_TEMPERATURE:
        close = 1e-5 * max(1.0, abs(scores.max()))
        allowed = set(np.flatnonzero(scores >= scores.max() - close))
    else:
        allowed = set(np.flatnonzero(oracle.probabilities(scores, params, slack=1e-4)))
    for sampled in result:
        assert sampled.token_id in allowed
        assert (sampled.logprobs is None) == (params.logprobs is None)
        if sampled.logprobs is not None:
            check_logprobs(sampled.logprobs, sampled.token_id, logits, params.logprobs or 0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(rows, min_size=1, max_size=8),
    st.integers(0, 10_000),
    st.lists(st.sampled_from([0.0, 0.0, 0.0, math.nan, math.inf, -math.inf]), min_size=8, max_size=8),
    st.randoms(use_true_random=False),
)
def test_a_rows_result_is_the_same_alone_and_in_any_company(
    batch: list[SampleRow], seed: int, faults: list[float], order: Any
) -> None:
    """C10, C12: with bad words, biases, NaN and infinities beside it."""
    logits = random_logits(seed, len(batch))
    for i, fault in enumerate(faults[: len(batch)]):
        logits[i, (seed + i) % VOCAB_SIZE] += fault
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(batch)]
    places = list(range(len(batch)))
    order.shuffle(places)
    together = sample(logits[places], [batch[i] for i in places])
    assert together == [alone[i] for i in places]
    for i, row in enumerate(batch):
        check_row(alone[i], logits[i].double().numpy(), row)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(0, 10_000))
def test_a_choice_is_what_it_is_alone(row: SampleRow, seed: int) -> None:
    logits = random_logits(seed, 1)
    (together,) = sample(logits, [row])
    for i, choice in enumerate(row.choices):
        one = SampleRow(row.sampling, range(choice, choice + 1), row.token_ids, row.num_prompt_tokens)
        (alone,) = sample(logits, [one])
        assert alone == (together if isinstance(together, str) else together[i : i + 1])


@settings(max_examples=150, deadline=None)
@given(rows, st.integers(0, 10_000), st.floats(0.05, 100.0), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_the_distribution_is_that_of_the_float64_reference(
    row: SampleRow, seed: int, temperature: float, top_p: float, min_p: float
) -> None:
    """Every processor and filter at once, each row's own, up to those at the very edge of min_p or top_p."""
    fields = ("min_tokens", "stop_token_ids", "logit_bias", "repetition_penalty", "presence_penalty")
    fields += ("frequency_penalty", "bad_word_ids", "top_k")
    kept = {name: getattr(row.sampling, name) for name in fields}
    kept["repetition_penalty"] = max(kept["repetition_penalty"], 0.5)  # beyond that float32 tells too little apart
    params = SamplingParams(max_tokens=20, seed=0, temperature=temperature, top_p=top_p, min_p=min_p, **kept)
    row = SampleRow(params, row.choices, row.token_ids, row.num_prompt_tokens)
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(VOCAB_SIZE, generator=generator)
    expected = oracle.processed(logits.double().numpy(), row, [EOS])
    changed = logits.clone()
    Sampler([EOS]).process(changed, row)
    np.testing.assert_allclose(changed.numpy(), expected, rtol=1e-5, atol=1e-4)
    if not changed.isfinite().any():
        return
    weights = distribution(changed, oracle.draw_by(params)).double().numpy()
    most, fewest = (set(np.flatnonzero(oracle.probabilities(expected, params, slack))) for slack in (1e-4, -1e-4))
    support = set(np.flatnonzero(weights))
    assert fewest & set(np.flatnonzero(oracle.softmax(expected / temperature) > 1e-12)) <= support <= most
    p = np.where(weights > 0, oracle.softmax(expected / temperature), 0.0)
    np.testing.assert_allclose(weights / weights.sum(), p / p.sum(), rtol=1e-3, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(rows, st.integers(0, 1000))
def test_a_result_does_not_depend_on_the_number_of_threads(row: SampleRow, seed: int) -> None:
    logits = random_logits(seed, 1, 70_001)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += sample(logits, [row])
    torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("varied", ["choice", "position", "seed"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6, "top_k": 9, "top_p": 0.9},
        {"temperature": 3.0, "min_p": 0.05, "logit_bias": ((2, 4.0), (5, -3.0)), "bad_word_ids": ((0,), (1, 7))},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 9},
    ],
    ids=["plain", "filtered", "biased", "penalised"],
)
def test_draws_follow_the_distribution(sampling: dict[str, Any], varied: str) -> None:
    """Pearson's chi-square of 4000 draws over one number of the three that they depend on: below its mean by five
    standard deviations in all of these."""
    count, prompt, output = 4000, [4, 4, 8], [1, 2, 2, 9, 1]
    logits = random_logits(5, 1)

    def row(seed: int = 11, choices: range = range(1), filler: int = 0) -> SampleRow:
        params = SamplingParams(max_tokens=20, **{"seed": seed, **sampling})
        return SampleRow(params, choices, [4] * filler + prompt + output, len(prompt) + filler)

    if varied == "choice":
        batch = [row(choices=range(count))]
    elif varied == "position":
        batch = [row(filler=i) for i in range(count)]
    else:
        batch = [row(seed=i) for i in range(count)]
    drawn = [
        sampled.token_id
        for result in sample(logits.repeat(len(batch), 1), batch)
        for sampled in result
        if isinstance(sampled, Sampled)
    ]
    assert len(drawn) == count
    p = oracle.probabilities(oracle.processed(logits[0].double().numpy(), row(), [EOS]), row().sampling)
    found = np.bincount(drawn, minlength=VOCAB_SIZE)
    assert not found[p == 0].any()
    expected = np.append(count * p[count * p >= 5], count * p[count * p < 5].sum())
    found = np.append(found[count * p >= 5], found[count * p < 5].sum())
    chi_square = ((found - expected) ** 2 / np.maximum(expected, 1)).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1))
