"""What a row's tokens are drawn from, and which they are: the definition, in plain torch.

Two nodes draw the same token from the same logits, whatever their CPUs, compilers and threads. So nothing here depends
on how a sum is ordered, on how a library computes exp, or on whether a product and a sum are rounded once or twice:

- A score is (logit - largest) * scale in float32: two operations, each rounded correctly everywhere.
- Its weight is exp(score) as an integer. score * log2(e), in float64, is exact, for the constant has 29 bits; rounded
  to 2^-32 it is an integer too. From there on there are only integers: 2 to the power of its fraction by a polynomial
  whose coefficients are positive, so that a larger score never weighs less, and a shift for the rest.
- Sums of integers are the same in any order.

The polynomial is within 2^-27 of exp. Shapes: R rows, V vocabulary, K likeliest tokens a row.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.base import Draw

_LEAST_SCORE = -43.5  # what is below weighs nothing, in any vocabulary
_LOG2_E = 387270501 / 2**28
_FRACTION_BITS = 32
# 2^x for x in [0, 1), in units of 2^-30: relative minimax, with 1 at 0 and no more than 2 at 1.
_POWER = (2**30, 744260972, 257944253, 59576866, 10388937, 1338725, 232067)
_POWER_BITS = 30

_USUALLY_ENOUGH = 1024  # of the likeliest tokens to hold top_p; sorting all takes twenty times as long


def weigh(scores: Tensor) -> Tensor:
    """exp(scores) in units of 1 / weight_of_one(V), rounded down: int64, whose sum over the last dimension fits.

    `scores` are at most 0. The total is off by less than V units and a share of 2^-27: with a 0 among the scores, by
    less than 2^-23 for vocabularies up to 2^18.
    """
    held = torch.where(scores > _LEAST_SCORE, scores, _LEAST_SCORE).double()
    fixed = held.mul_(_LOG2_E * 2**_FRACTION_BITS).round_().long()
    fractions = fixed & (2**_FRACTION_BITS - 1)
    powers = torch.full_like(fixed, _POWER[-1])
    for coefficient in reversed(_POWER[:-1]):
        powers.mul_(fractions).bitwise_right_shift_(_FRACTION_BITS).add_(coefficient)
    powers.bitwise_left_shift_(_one_bits(scores.shape[-1]) - _POWER_BITS)
    return powers.bitwise_right_shift_(fixed.bitwise_right_shift_(_FRACTION_BITS).neg_())


def weight_of_one(vocab_size: int) -> int:
    """The weight of a score of 0."""
    return 1 << _one_bits(vocab_size)


def _one_bits(vocab_size: int) -> int:
    return 62 - vocab_size.bit_length()


def likeliest(logits_RV: Tensor, count: int) -> Tensor:
    """Ids [R, count] of each row's largest logits, the largest first; of equals the lower id first. None is NaN."""
    num_rows = logits_RV.shape[0]
    if count == 0 or num_rows == 0:
        return torch.empty(num_rows, count, dtype=torch.int64, device=logits_RV.device)
    least = logits_RV.topk(count, sorted=True).values[:, -1:]  # which of equals it takes is not defined
    rows, ids = (logits_RV >= least).nonzero(as_tuple=True)  # by row, then by id
    order = logits_RV[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    first = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    return ids[order[first[:, None] + torch.arange(count, device=rows.device)]]


def distribution(logits_V: Tensor, draw: Draw) -> Tensor:
    """What a row's tokens are drawn from: a weight, int64, for each token.

    The largest logit is finite, and none is NaN. Of what min_p leaves top_k keeps the likeliest, of those top_p the
    fewest that hold its share; of equals the lower ids.
    """
    weights = weigh((logits_V - logits_V.max()) * logits_V.new_tensor(draw.scale))
    if draw.min_p > 0:
        weights.masked_fill_(weights < math.ceil(draw.min_p * weight_of_one(len(weights))), 0)
    if draw.top_k:
        num_left = int(weights.count_nonzero())
        weights = _only(weights, likeliest(logits_V[None], min(draw.top_k, num_left))[0])
    if draw.top_p < 1:
        weights = _only(weights, _fewest_that_hold(logits_V, weights, draw.top_p))
    return weights


def draw(weights_V: Tensor, numbers: Sequence[float]) -> list[int]:
    """The token at each of some numbers in [0, 1), which say how far into all the weight, in the order of the ids."""
    cumulative = weights_V.cumsum(0)
    total = int(cumulative[-1])
    targets = torch.tensor([int(number * total) for number in numbers], dtype=torch.int64, device=weights_V.device)
    return torch.searchsorted(cumulative, targets, right=True).tolist()


def _only(weights_V: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(weights_V).scatter_(0, ids, weights_V[ids])


def _fewest_that_hold(logits_V: Tensor, weights_V: Tensor, top_p: float) -> Tensor:
    """The ids that have top_p of the weight, the likeliest first."""
    total, num_left = int(weights_V.sum()), int(weights_V.count_nonzero())
    enough = math.ceil(top_p * total)
    ids = likeliest(logits_V[None], min(_USUALLY_ENOUGH, num_left))[0]
    if int(weights_V[ids].sum()) < enough:
        ids = logits_V.argsort(descending=True, stable=True)[:num_left]
    return ids[: 1 + int((weights_V[ids].cumsum(0) < enough).sum())]
