"""From logits to tokens, row by row.

A token depends on its own logits, its own parameters and (seed, choice, position) alone: never on other rows, nor on
how often or where the row was computed before. So it stays the same beside other requests, after a preemption, on
another node, in a replay.

    logits -> processors, each of which changes the row's logits -> greedy: the first of the largest
                                                                 -> else: temperature, min_p, top_k, top_p, draw

Shapes: S rows that sample, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.errors import Internal, KvrelayError
from kvrelay.engine.request import SamplingParams

GREEDY_TEMPERATURE = 1e-5  # below it scores would overflow; the distribution is one token's long before

_MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row's next token depends on, beside its logits."""

    sampling: SamplingParams
    choice: int
    token_ids: Seq[int]  # of the sequence so far: prompt, then output
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """Of the new token in its sequence."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Before the new one."""
        return len(self.token_ids) - self.num_prompt_tokens


class Sampler:
    """Samples for a model whose end-of-sequence ids are known."""

    def __init__(self, eos_token_ids: Seq[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits_SV: Tensor, rows: Seq[SampleRow]) -> list[int | KvrelayError]:
        """A token for each row, or the error that is that row's alone. May change `logits_SV`, which is float32."""
        finite = logits_SV.isfinite().all(dim=-1).tolist()
        for logits_V, row in zip(logits_SV, rows, strict=True):
            for process in self._processors(row):
                process(logits_V)
        largest, greedy = (column.tolist() for column in _first_largest(logits_SV))
        results: list[int | KvrelayError] = []
        for i, row in enumerate(rows):
            if not finite[i]:
                results.append(Internal("the model's logits are not finite"))
            elif largest[i] == -math.inf:
                results.append(Internal("the sampling parameters leave no token to choose"))
            elif row.sampling.temperature < GREEDY_TEMPERATURE:
                results.append(greedy[i])
            else:
                results.append(_draw(logits_SV[i], row.sampling, uniform(row.sampling.seed, row.choice, row.position)))
        return results

    def _processors(self, row: SampleRow) -> list[Callable[[Tensor], None]]:
        """What this row's parameters ask for, in the order in which it is applied."""
        sampling = row.sampling
        processors: list[Callable[[Tensor], None]] = []
        if row.num_output_tokens + 1 < sampling.min_tokens:
            processors.append(_forbid({*self._eos_token_ids, *sampling.stop_token_ids}))
        if sampling.logit_bias:
            processors.append(_add_bias(sampling.logit_bias))
        if sampling.repetition_penalty != 1.0:
            processors.append(_penalise_repetition(row.token_ids, sampling.repetition_penalty))
        if sampling.presence_penalty or sampling.frequency_penalty:
            output_ids = row.token_ids[row.num_prompt_tokens :]
            processors.append(_penalise_output(output_ids, sampling.presence_penalty, sampling.frequency_penalty))
        return processors


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), the same for the same three on every machine: 52 bits of a SplitMix64 chain over them.

    With 52 bits its product with a float64 total is always below that total.
    """
    state = splitmix64(seed)
    state = splitmix64(state ^ choice)
    return (splitmix64(state ^ position) >> 12) / 2**52


def splitmix64(value: int) -> int:
    """The output of SplitMix64 (Steele, Lea, Flood 2014) in a given state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _forbid(token_ids: set[int]) -> Callable[[Tensor], None]:
    def process(logits_V: Tensor) -> None:
        logits_V[[token_id for token_id in token_ids if 0 <= token_id < len(logits_V)]] = -math.inf

    return process


def _add_bias(logit_bias: Seq[tuple[int, float]]) -> Callable[[Tensor], None]:
    """Each token's bias is added to its logit."""

    def process(logits_V: Tensor) -> None:
        ids = _tensor([token_id for token_id, _ in logit_bias], logits_V)
        logits_V[ids] += logits_V.new_tensor([bias for _, bias in logit_bias])

    return process


def _penalise_repetition(token_ids: Seq[int], penalty: float) -> Callable[[Tensor], None]:
    """A token of the prompt or the output has its logit divided by the penalty, or multiplied where it is negative
    (Keskar et al. 2019)."""

    def process(logits_V: Tensor) -> None:
        ids = _tensor(sorted(set(token_ids)), logits_V)
        logits = logits_V[ids]
        logits_V[ids] = torch.where(logits > 0, logits / penalty, logits * penalty)

    return process


def _penalise_output(token_ids: Seq[int], presence: float, frequency: float) -> Callable[[Tensor], None]:
    """A token loses `presence` once it is in the output, and `frequency` for each time it is."""

    def process(logits_V: Tensor) -> None:
        counts = Counter(token_ids)
        ids = _tensor(list(counts), logits_V)
        logits_V[ids] -= _tensor(list(counts.values()), logits_V) * frequency + presence

    return process


def _tensor(token_ids: Seq[int], logits_V: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=logits_V.device)


def _first_largest(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and the lowest id that has it."""
    ids = logits_SV.argmax(dim=-1)
    return logits_SV.gather(-1, ids[:, None])[:, 0], ids


def _draw(logits_V: Tensor, sampling: SamplingParams, u: float) -> int | KvrelayError:
    """The token at `u` of the distribution's cumulative sum, in the order of the ids."""
    scores = (logits_V - logits_V.max()) / sampling.temperature
    if sampling.min_p > 0:
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)
    if sampling.top_k or sampling.top_p < 1:
        scores = _keep_likeliest(scores, sampling.top_k or len(scores), sampling.top_p)
    cumulative = scores.exp().double().cumsum(0)  # one thread's work, in order
    total = float(cumulative[-1])
    if not 0 < total < math.inf:
        return Internal(f"the distribution to draw from sums to {total}")
    return int(torch.searchsorted(cumulative, u * total, right=True))


def _keep_likeliest(scores_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the `top_k` likeliest, of those the fewest that hold `top_p` of their probability; of equals, lower ids."""
    ordered, ids = scores_V.sort(descending=True, stable=True)
    ordered, ids = ordered[:top_k], ids[:top_k]
    if top_p < 1:
        cumulative = ordered.exp().double().cumsum(0)
        num_kept = 1 + int((cumulative[:-1] < top_p * cumulative[-1]).sum())
        ordered, ids = ordered[:num_kept], ids[:num_kept]
    return torch.full_like(scores_V, -math.inf).scatter_(0, ids, ordered)
