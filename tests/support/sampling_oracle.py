"""What a sampler should do, written for its reader: plain numpy in float64, one token after the other, slow."""

import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import SampleRow
from kvrelay.kernels.base import Draw

Floats = NDArray[np.float64]


def biased(logits: Floats, logit_bias: Seq[tuple[int, float]]) -> Floats:
    result = logits.copy()
    for token_id, bias in logit_bias:
        result[token_id] = result[token_id] + bias
    return result


def repetition_penalised(logits: Floats, token_ids: Seq[int], penalty: float) -> Floats:
    """Over prompt and output."""
    result = logits.copy()
    for token_id in range(len(logits)):
        if token_id in token_ids:
            result[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    return result


def output_penalised(logits: Floats, output_ids: Seq[int], presence: float, frequency: float) -> Floats:
    """As the OpenAI API defines them: mu - count * frequency - (count > 0) * presence."""
    result = logits.copy()
    for token_id in range(len(logits)):
        count = list(output_ids).count(token_id)
        result[token_id] = logits[token_id] - count * frequency - (presence if count else 0.0)
    return result


def forbidden_ends(sampling: SamplingParams, num_output_tokens: int, eos_token_ids: Seq[int]) -> set[int]:
    """What would end the choice, while it would have fewer than min_tokens with the new token."""
    if num_output_tokens + 1 < sampling.min_tokens:
        return {*eos_token_ids, *sampling.stop_token_ids}
    return set()


def forbidden_by_bad_words(bad_word_ids: Seq[Seq[int]], output_ids: Seq[int], vocab_size: int) -> set[int]:
    """Every token after which the output would end with a bad word."""

    def ends_with(token_ids: Seq[int], word: Seq[int]) -> bool:
        return len(token_ids) >= len(word) and list(token_ids[len(token_ids) - len(word) :]) == list(word)

    return {
        token_id
        for token_id in range(vocab_size)
        if any(ends_with([*output_ids, token_id], word) for word in bad_word_ids)
    }


def processed(logits: Floats, row: SampleRow, eos_token_ids: Seq[int]) -> Floats:
    """Everything before temperature."""
    sampling, output_ids = row.sampling, row.token_ids[row.num_prompt_tokens :]
    result = biased(logits, sampling.logit_bias)
    result = repetition_penalised(result, row.token_ids, sampling.repetition_penalty)
    result = output_penalised(result, output_ids, sampling.presence_penalty, sampling.frequency_penalty)
    forbidden = forbidden_ends(sampling, len(output_ids), eos_token_ids)
    forbidden |= forbidden_by_bad_words(sampling.bad_word_ids, output_ids, len(logits))
    for token_id in forbidden:
        if 0 <= token_id < len(logits):
            result[token_id] = -math.inf
    return result


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def likeliest_first(scores: Floats) -> list[int]:
    """All ids; of equals the lower first."""
    return sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))


def probabilities(logits: Floats, sampling: SamplingParams, slack: float = 0.0) -> Floats:
    """What processed logits are drawn from: temperature, min_p, top_k, top_p. `slack` keeps more (or, below zero,
    fewer) of the tokens that are within it of min_p or top_p."""
    p = softmax(logits / sampling.temperature)
    p[p < min(sampling.min_p - slack, 1.0) * p.max()] = 0.0
    order = likeliest_first(np.where(p > 0, logits, -math.inf))
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0.0
    if sampling.top_p < 1:
        total, held = p.sum(), 0.0
        for rank, token_id in enumerate(order):
            if rank > 0 and held >= (sampling.top_p + slack) * total:
                p[token_id] = 0.0
            else:
                held += p[token_id]
    return p / p.sum()


def draw_by(sampling: SamplingParams) -> Draw:
    """A draw of nothing, by a request's parameters: what `kernels/sampling.py` makes a distribution of."""
    return Draw(0, (), sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)
