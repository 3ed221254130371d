"""How likely tokens are: log-probabilities of given tokens and of the likeliest.

Every row's results are its own: the same bits alone, in any batch, on any number of threads. Sums are why that needs
care, for floats add up differently in another order: `kernels/sampling.py` says how they are made here.

Shapes: R rows, V vocabulary, N chosen tokens a row, K likeliest tokens a row.
"""

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvrelay.engine.request import Logprobs
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.sampling import weight_of_one

NOT_FINITE = "the model's logits are not finite"

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROWS = 16  # computed at once: what is in between stays in the cache


def token_logprobs(
    logits_RV: Tensor, chosen: Seq[Seq[int]], num_likeliest: Seq[int], kernels: Kernels
) -> list[tuple[Logprobs, ...] | None]:
    """For each row one `Logprobs` for each token chosen there, followed by the row's likeliest; None for a row that is
    not finite."""
    results: list[tuple[Logprobs, ...] | None] = []
    for start in range(0, len(chosen), _ROWS):
        rows = slice(start, start + _ROWS)
        results += _token_logprobs(logits_RV[rows], chosen[rows], num_likeliest[rows], kernels)
    return results


def _token_logprobs(
    logits_RV: Tensor, chosen: Seq[Seq[int]], num_likeliest: Seq[int], kernels: Kernels
) -> list[tuple[Logprobs, ...] | None]:
    largest_R, _, finite_R = kernels.scan(logits_RV)
    finite = finite_R.tolist()
    if not all(finite):
        logits_RV, largest_R = logits_RV.masked_fill(~finite_R[:, None], 0.0), largest_R.masked_fill(~finite_R, 0.0)
    num_chosen = max(map(len, chosen))
    padded = [[*row, *[0] * (num_chosen - len(row))] for row in chosen]
    chosen_RN = torch.tensor(padded, dtype=torch.int64, device=logits_RV.device)
    ids_RK = kernels.likeliest(logits_RV, min(logits_RV.shape[1], max(num_likeliest)))
    totals = kernels.total_weights(logits_RV)
    values = _log_softmax(logits_RV, largest_R, totals, torch.cat([chosen_RN, ids_RK], dim=1)).tolist()
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


def _log_softmax(logits_RV: Tensor, largest_R: Tensor, totals_R: Tensor, ids_RC: Tensor) -> Tensor:
    """The logarithm of the softmax of finite logits, at some ids: float32, finite, at most 0."""
    one = weight_of_one(logits_RV.shape[1])
    # The log of Python, not of torch, whose last bit may depend on where in a tensor an element stands.
    log_totals = torch.tensor([math.log(total / one) for total in totals_R.tolist()], dtype=torch.float64)
    shifts_R = largest_R.double()[:, None]
    values = logits_RV.gather(1, ids_RC).double() - shifts_R - log_totals.to(logits_RV.device)[:, None]
    return values.clamp_(min=-_FLOAT32_MAX).float()
