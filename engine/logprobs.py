"""How likely tokens are: probabilities as integers, and log-probabilities of given tokens and of the likeliest.

Every row's results are its own: the same bits alone, in any batch, on any number of threads. Sums are why that needs
care, for floats add up differently in another order. Here exp(x - largest) becomes an integer, and integers do not.

Shapes: R rows, V vocabulary, N chosen tokens a row, K likeliest tokens a row.
"""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvrelay.engine.request import Logprobs

NOT_FINITE = "the model's logits are not finite"

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROWS = 16  # computed at once: what is in between stays in the cache


def are_finite(logits_RV: Tensor) -> list[bool]:
    """Whether a row has neither NaN nor an infinity. The extremes tell, in a tenth of the time of `isfinite`."""
    return (logits_RV.amin(-1).isfinite() & logits_RV.amax(-1).isfinite()).tolist()


def weigh(scores: Tensor) -> Tensor:
    """exp(scores) in units of 1 / weight_of_one(V), rounded down: int64, whose sum over the last dimension fits.

    `scores` are at most 0. The total is off by less than V units: with a 0 among the scores, by less than 2^-24 for
    vocabularies up to 2^18.
    """
    return (scores.exp() * weight_of_one(scores.shape[-1])).long()


def weight_of_one(vocab_size: int) -> int:
    """The weight of a score of 0."""
    return 1 << (62 - vocab_size.bit_length())


def likeliest(scores_RV: Tensor, count: int) -> Tensor:
    """Ids [R, count] of each row's largest scores, the largest first; of equals the lower id first. None is NaN."""
    num_rows = scores_RV.shape[0]
    if count == 0 or num_rows == 0:
        return torch.empty(num_rows, count, dtype=torch.int64, device=scores_RV.device)
    least = scores_RV.topk(count, sorted=True).values[:, -1:]  # which of equals it takes is not defined
    rows, ids = (scores_RV >= least).nonzero(as_tuple=True)  # by row, then by id
    order = scores_RV[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    first = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    return ids[order[first[:, None] + torch.arange(count, device=rows.device)]]


def token_logprobs(
    logits_RV: Tensor, chosen: Seq[Seq[int]], num_likeliest: Seq[int]
) -> list[tuple[Logprobs, ...] | None]:
    """For each row one `Logprobs` for each token chosen there, followed by the row's likeliest; None for a row that is
    not finite."""
    results: list[tuple[Logprobs, ...] | None] = []
    for start in range(0, len(chosen), _ROWS):
        rows = slice(start, start + _ROWS)
        results += _token_logprobs(logits_RV[rows], chosen[rows], num_likeliest[rows])
    return results


def _token_logprobs(
    logits_RV: Tensor, chosen: Seq[Seq[int]], num_likeliest: Seq[int]
) -> list[tuple[Logprobs, ...] | None]:
    finite = are_finite(logits_RV)
    if not all(finite):
        logits_RV = logits_RV.masked_fill(~torch.tensor(finite, device=logits_RV.device)[:, None], 0.0)
    num_chosen = max(map(len, chosen))
    padded = [[*row, *[0] * (num_chosen - len(row))] for row in chosen]
    chosen_RN = torch.tensor(padded, dtype=torch.int64, device=logits_RV.device)
    ids_RK = likeliest(logits_RV, min(logits_RV.shape[1], max(num_likeliest)))
    values = _log_softmax(logits_RV, torch.cat([chosen_RN, ids_RK], dim=1)).tolist()
    results: list[tuple[Logprobs, ...] | None] = []
    for row, ids in enumerate(ids_RK.tolist()):
        top_ids = ids[: num_likeliest[row]]
        top_values = values[row][num_chosen : num_chosen + len(top_ids)]
        found = (
            Logprobs((token_id, *top_ids), (value, *top_values))
            for token_id, value in zip(chosen[row], values[row], strict=False)
        )
        results.append(tuple(found) if finite[row] else None)
    return results


def _log_softmax(logits_RV: Tensor, ids_RC: Tensor) -> Tensor:
    """The logarithm of the softmax of finite logits, at some ids: float32, finite, at most 0."""
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    totals = weigh(logits_RV - largest_R1).sum(-1).tolist()
    one = weight_of_one(logits_RV.shape[1])
    # The log of Python, not of torch, whose last bit may depend on where in a tensor an element stands.
    log_totals = torch.tensor([math.log(total / one) for total in totals], dtype=torch.float64)
    values = logits_RV.gather(1, ids_RC).double() - largest_R1.double() - log_totals.to(logits_RV.device)[:, None]
    return values.clamp_(min=-_FLOAT32_MAX).float()
