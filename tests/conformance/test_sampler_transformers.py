"""The sampler's steps against transformers' own, where those exist, and against a plain float64 reference."""

from typing import Any

import numpy as np
import pytest
import torch
from support import sampling_oracle as oracle
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import Sampler, SampleRow
from kvrelay.kernels.sampling import distribution

V, NUM_PROMPT = 50, 6
EOS = (7, 31)


def processed(logits: torch.Tensor, token_ids: list[int], **sampling: Any) -> torch.Tensor:
    """What this row's parameters make of its logits; the float64 reference must agree."""
    row = SampleRow(SamplingParams(max_tokens=9, seed=0, **sampling), range(1), token_ids, NUM_PROMPT)
    changed = logits.clone()
    Sampler(EOS).process(changed, row)
    expected = oracle.processed(logits.double().numpy(), row, EOS)
    np.testing.assert_allclose(changed.numpy(), expected, rtol=1e-6, atol=1e-6)
    return changed


def probabilities(logits: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """What a token is drawn from; the float64 reference must agree."""
    params = SamplingParams(max_tokens=9, seed=0, **sampling)
    weights = distribution(logits, oracle.draw_by(params)).double()
    found = weights / weights.sum()
    expected = oracle.probabilities(logits.double().numpy(), params)
    assert ((found > 1e-12).numpy() == (expected > 1e-12)).all()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    return found.float()


def theirs(processor: Any, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([token_ids], dtype=torch.int64), logits[None].clone())[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(V, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def token_ids() -> list[int]:
    return torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.2, 10.0])
def test_the_repetition_penalty_is_transformers_s(logits: torch.Tensor, token_ids: list[int], penalty: float) -> None:
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), token_ids, logits)
    assert torch.equal(processed(logits, token_ids, repetition_penalty=penalty), expected)


def test_the_logit_bias_is_transformers_s(logits: torch.Tensor, token_ids: list[int]) -> None:
    bias = {3: 4.5, 17: -100.0, 49: 0.125}
    processor = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    changed = processed(logits, token_ids, logit_bias=tuple(bias.items()))
    assert torch.equal(changed, theirs(processor, token_ids, logits))


def test_presence_and_frequency_count_the_output_alone(logits: torch.Tensor, token_ids: list[int]) -> None:
    """As the OpenAI API defines them: mu - c * frequency - (c > 0) * presence."""
    counts = torch.bincount(torch.tensor(token_ids[NUM_PROMPT:]), minlength=V)
    expected = logits - counts * 0.5 - (counts > 0) * 1.5
    changed = processed(logits, token_ids, presence_penalty=1.5, frequency_penalty=0.5)
    assert torch.allclose(changed, expected)
    assert torch.equal(changed[counts == 0], logits[counts == 0])


@pytest.mark.parametrize("tail", [[], [11], [11, 12], [11, 12, 13], [12, 11], [13, 13]])
def test_bad_words_are_those_of_transformers_over_the_output(
    logits: torch.Tensor, token_ids: list[int], tail: list[int]
) -> None:
    """Theirs looks at all it is given, so it is given the output; longer than any of the words, for it passes over a
    word that is longer than that."""
    words = ((5,), (11, 12), (11, 12, 13), (12, 13, 14), (11, 12, 13, 14), (13, 13, 13, 13), (6, 11))
    token_ids = [*token_ids, *tail]
    expected = theirs(NoBadWordsLogitsProcessor([list(word) for word in words]), token_ids[NUM_PROMPT:], logits)
    changed = processed(logits, token_ids, bad_word_ids=words)
    assert torch.equal(changed, expected)
    assert not changed.isfinite().all()


@pytest.mark.parametrize("min_tokens", [13, 14, 15, 16])
def test_min_tokens_is_transformers_s(logits: torch.Tensor, token_ids: list[int], min_tokens: int) -> None:
    """Theirs counts the tokens there are, ours the new one too, which is the last that may end the choice."""
    processor = MinNewTokensLengthLogitsProcessor(NUM_PROMPT, min_tokens - 1, list(EOS), device="cpu")
    expected = theirs(processor, token_ids, logits)
    assert torch.equal(processed(logits, token_ids, min_tokens=min_tokens), expected)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 100.0])
def test_the_temperature_is_transformers_s(logits: torch.Tensor, temperature: float) -> None:
    expected = theirs(TemperatureLogitsWarper(temperature), [0], logits).softmax(-1)
    assert torch.allclose(probabilities(logits, temperature=temperature), expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 7, 49, 50, 51])
def test_top_k_is_transformers_s(logits: torch.Tensor, top_k: int) -> None:
    expected = theirs(TopKLogitsWarper(top_k), [0], logits).softmax(-1)
    found = probabilities(logits, top_k=top_k)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_transformers_s(logits: torch.Tensor, top_p: float) -> None:
    expected = theirs(TopPLogitsWarper(top_p), [0], logits).softmax(-1)
    found = probabilities(logits, top_p=top_p)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("min_p", [1e-6, 0.01, 0.3, 1.0])
def test_min_p_is_transformers_s(logits: torch.Tensor, min_p: float) -> None:
    expected = theirs(MinPLogitsWarper(min_p), [0], logits).softmax(-1)
    found = probabilities(logits, min_p=min_p)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6)


def test_all_of_them_together_are_theirs_one_after_the_other(logits: torch.Tensor, token_ids: list[int]) -> None:
    row = {"logit_bias": ((3, 4.5), (5, 100.0)), "repetition_penalty": 1.3, "bad_word_ids": ((5,), (token_ids[-1], 9))}
    changed = processed(logits, token_ids, **row, min_tokens=16)
    expected = logits
    for processor, context in [
        (SequenceBiasLogitsProcessor([[[3], 4.5], [[5], 100.0]]), token_ids),
        (RepetitionPenaltyLogitsProcessor(1.3), token_ids),
        (NoBadWordsLogitsProcessor([[5], [token_ids[-1], 9]]), token_ids[NUM_PROMPT:]),
        (MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 15, list(EOS), device="cpu"), token_ids),
    ]:
        expected = theirs(processor, context, expected)
    assert torch.equal(changed, expected)
    for warper in (TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.001), TopKLogitsWarper(9), TopPLogitsWarper(0.9)):
        expected = theirs(warper, token_ids, expected)
    found = probabilities(changed, temperature=0.8, min_p=0.001, top_k=9, top_p=0.9)
    assert torch.allclose(found, expected.softmax(-1), atol=1e-6)
