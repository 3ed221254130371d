"""From logits to tokens, row by row.

A token depends on its own logits, its own parameters and (seed, choice, position) alone: never on other rows, nor on
how often or where the row was computed before. So it stays the same beside other requests, after a preemption, on
another node, in a replay.

    logits -> bias, repetition penalty, presence and frequency penalties -> forbidden tokens become -inf
           -> of a structured output: what its form does not allow becomes -inf
           -> greedy: the first of the largest
           -> else: temperature, min_p, top_k, top_p, one draw for each choice

Tokens are forbidden last: no bias brings one back. Finite logits stay finite up to there. Log-probabilities are those
of the logits as they came.

Shapes: S rows that sample, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from itertools import repeat
from operator import eq

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.errors import Internal, KvrelayError
from kvrelay.engine.logprobs import NOT_FINITE, token_logprobs
from kvrelay.engine.request import Logprobs, Matcher, SamplingParams
from kvrelay.engine.seen_tokens import SeenTokens
from kvrelay.engine.step import Sampled
from kvrelay.kernels.base import Draw, Kernels
from kvrelay.kernels.reference import ReferenceKernels

GREEDY_TEMPERATURE = 1e-5  # below it scores would overflow; the distribution is one token's long before

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row's next tokens depend on, beside its logits."""

    sampling: SamplingParams
    choices: range  # one token each
    token_ids: Seq[int]  # of the sequence so far: prompt, then output
    num_prompt_tokens: int
    matcher: Matcher | None = None
    seen: SeenTokens | None = None  # where there are penalties; None: counted anew

    @property
    def position(self) -> int:
        """Of the new tokens in their sequences."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Before the new one."""
        return len(self.token_ids) - self.num_prompt_tokens


class Sampler:
    """Samples for a model whose end-of-sequence ids are known."""

    def __init__(self, eos_token_ids: Seq[int], kernels: Kernels | None = None) -> None:
        """`kernels`: those in use; None: the reference's."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._kernels = kernels or ReferenceKernels()

    def sample(self, logits_SV: Tensor, rows: Seq[SampleRow]) -> list[tuple[Sampled, ...] | KvrelayError]:
        """A token for each of each row's choices, or the error that is that row's alone.

        May change `logits_SV`, which is float32.
        """
        largest, greedy, finite = (column.tolist() for column in self._kernels.scan(logits_SV))
        asked = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
        raw_logits = logits_SV[list(asked)] if asked else logits_SV  # a copy of what is asked for
        failed: dict[int, KvrelayError] = {}
        changing = [i for i, row in enumerate(rows) if row.sampling.changes_logits or row.matcher is not None]
        for i in changing:
            if (error := self._try_to_process(logits_SV[i], rows[i])) is not None:
                failed[i] = error
        if changing:
            largest, greedy, _ = (column.tolist() for column in self._kernels.scan(logits_SV))
        draws = [
            _draw(i, row)
            for i, row in enumerate(rows)
            if i not in failed and finite[i] and math.isfinite(largest[i]) and not _is_greedy(row.sampling)
        ]
        drawn = iter(self._kernels.draw(logits_SV, draws) if draws else ())
        chosen: list[list[int] | KvrelayError] = []
        for i, row in enumerate(rows):
            if i in failed:
                chosen.append(failed[i])
            elif not finite[i]:
                chosen.append(Internal(NOT_FINITE))
            elif not math.isfinite(largest[i]):
                chosen.append(Internal("the sampling parameters leave no token to choose"))
            elif _is_greedy(row.sampling):
                chosen.append([greedy[i]] * len(row.choices))
            else:
                chosen.append(next(drawn))
        if not asked:
            return [_result(row, None) for row in chosen]
        tokens = [() if isinstance(row, KvrelayError) else row for row in (chosen[i] for i in asked)]
        found = token_logprobs(raw_logits, tokens, list(asked.values()), self._kernels)
        logprobs = dict(zip(asked, found, strict=True))
        return [_result(row, logprobs.get(i)) for i, row in enumerate(chosen)]

    def process(self, logits_V: Tensor, row: SampleRow) -> None:
        """Apply to a row's logits, in place, what its parameters ask for before a token is chosen.

        Raises: Internal for a structured output that cannot go on.
        """
        sampling = row.sampling
        if sampling.logit_bias:
            _add_bias(logits_V, sampling.logit_bias)
        if sampling.penalises:
            seen = (row.seen or SeenTokens(row.num_prompt_tokens)).catch_up(row.token_ids)
            _penalise_repetition(logits_V, seen, sampling.repetition_penalty)
            _penalise_output(logits_V, seen, sampling.presence_penalty, sampling.frequency_penalty)
        if forbidden := self._forbidden(row):
            logits_V[[token_id for token_id in forbidden if 0 <= token_id < len(logits_V)]] = -math.inf
        if row.matcher is not None:
            _forbid_others(logits_V, row.matcher.allowed(row.token_ids[row.num_prompt_tokens :]))

    def _try_to_process(self, logits_V: Tensor, row: SampleRow) -> KvrelayError | None:
        try:
            self.process(logits_V, row)
        except KvrelayError as error:
            return error
        return None

    def _forbidden(self, row: SampleRow) -> set[int]:
        """What ends a choice, below min_tokens; and what would complete a bad word."""
        forbidden = set(_ends_of_bad_words(row)) if row.sampling.bad_word_ids else set()
        if row.num_output_tokens + 1 < row.sampling.min_tokens:
            forbidden.update(self._eos_token_ids, row.sampling.stop_token_ids)
        return forbidden


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), the same for the same three on every machine: 52 bits of a SplitMix64 chain over them.

    With 52 bits its product with a total, as a float64, is always below that total.
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


def _is_greedy(sampling: SamplingParams) -> bool:
    return not sampling.temperature >= GREEDY_TEMPERATURE


def _draw(index: int, row: SampleRow) -> Draw:
    sampling = row.sampling
    numbers = [uniform(sampling.seed, choice, row.position) for choice in row.choices]
    return Draw(index, numbers, sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p)


def _result(
    tokens: list[int] | KvrelayError, logprobs: tuple[Logprobs, ...] | None
) -> tuple[Sampled, ...] | KvrelayError:
    if isinstance(tokens, KvrelayError):
        return tokens
    return tuple(map(Sampled, tokens, repeat(None) if logprobs is None else logprobs))


def _add_bias(logits_V: Tensor, logit_bias: Seq[tuple[int, float]]) -> None:
    """Each token's bias is added to its logit."""
    ids = _tensor([token_id for token_id, _ in logit_bias], logits_V)
    logits_V[ids] += logits_V.new_tensor([bias for _, bias in logit_bias])


def _penalise_repetition(logits_V: Tensor, seen: SeenTokens, penalty: float) -> None:
    """A token of the prompt or the output has its logit divided by the penalty, or multiplied where it is negative
    (Keskar et al. 2019)."""
    if penalty == 1.0:
        return
    ids = seen.ids().to(logits_V.device)
    logits = logits_V[ids]
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits_V[ids] = penalised.clamp_(-_FLOAT32_MAX, _FLOAT32_MAX)  # an extreme penalty makes no infinity


def _penalise_output(logits_V: Tensor, seen: SeenTokens, presence: float, frequency: float) -> None:
    """A token loses `presence` once it is in the output, and `frequency` for each time it is."""
    if not (presence or frequency):
        return
    ids, counts = (column.to(logits_V.device) for column in seen.output())
    logits_V[ids] -= counts * frequency + presence


def _ends_of_bad_words(row: SampleRow) -> Iterable[int]:
    """The last token of each bad word whose other tokens the output so far ends with."""
    for word in row.sampling.bad_word_ids:
        begun = word[:-1]
        if len(begun) <= row.num_output_tokens and all(map(eq, reversed(begun), reversed(row.token_ids))):
            yield word[-1]


def _forbid_others(logits_V: Tensor, allowed: bytes) -> None:
    """Of the tokens only those stay whose bit is set."""
    forbidden = np.unpackbits(~np.frombuffer(allowed, np.uint8), count=len(logits_V), bitorder="little").view(np.bool_)
    logits_V.masked_fill_(torch.from_numpy(forbidden).to(logits_V.device), -math.inf)


def _tensor(values: Seq[int], beside: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=beside.device)
