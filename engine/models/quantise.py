"""Weights made smaller when a model is loaded: codes of 8 or 4 bits, of which 32 inputs of an output share a scale.

    8 bits:  code * scale             from -127 to 127, the group's largest value at an end
    4 bits:  code * scale + minimum   from 0 to 15, fitted by least squares to several cuts of the group's range

Computed in pieces that fit a core's cache, each with its groups side by side: shapes are [inputs of a group, groups].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrelay.kernels.base import QuantisedWeight

GROUP = 32
_PIECE = 2**17  # weights
_CUTS = (
    1.0,
    0.9,
)  # parts of a group's range that the codes span at first; a third takes half as long again for 1 % less
_FLOAT16_RANGE = (2.0**-4, 2.0**15)  # of a weight's largest value: its scales then have all bits of a float16, or many

Fit = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, minimums


def quantise(weight_OC: Tensor, bits: Literal[4, 8]) -> QuantisedWeight:
    """A weight of floats in so many bits an input. Beside the result it takes little memory.

    Values that are no numbers make their whole group none.
    """
    num_outputs, num_inputs = weight_OC.shape
    num_groups = -(-num_inputs // GROUP)
    least, most = _FLOAT16_RANGE
    narrow = torch.float16 if least <= float(weight_OC.abs().max()) <= most else torch.bfloat16
    stored = torch.float16 if narrow == torch.float16 else torch.float32
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
    scales = torch.empty(num_outputs, num_groups, dtype=stored)
    minimums = torch.empty_like(scales) if bits == 4 else None
    num_rows = max(1, _PIECE // (num_groups * GROUP))
    with _one_thread():
        for start in range(0, num_outputs, num_rows):
            rows = slice(start, start + num_rows)
            fitted, scale, minimum = _FITS[bits](_groups(weight_OC[rows]), narrow)
            codes[rows] = fitted.t().reshape(len(codes[rows]), -1)[:, :num_inputs]
            scales[rows] = scale.view(-1, num_groups)
            if minimums is not None and minimum is not None:
                minimums[rows] = minimum.view(-1, num_groups)
    return QuantisedWeight(codes, scales, minimums, bits, GROUP, weight_OC.dtype)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Of torch's: for pieces this small several gain little, and where cores are shared they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _groups(weight_OC: Tensor) -> Tensor:
    """The last group of an output filled up with its last value, which changes no range."""
    values = weight_OC.float()
    missing = -values.shape[1] % GROUP
    if missing:
        values = pad(values[None], (0, missing), mode="replicate")[0]
    return values.view(-1, GROUP).t().contiguous()


def _fit8(groups: Tensor, narrow: torch.dtype) -> Fit:
    scale = (groups.abs().amax(0) / 127).to(narrow).float()
    codes = (groups * _inverse(scale)).round_().clamp_(-127, 127)
    return codes, scale, None


def _fit4(groups: Tensor, narrow: torch.dtype) -> Fit:
    low, high = groups.aminmax(dim=0)
    total = _sum(groups)
    codes = scale = minimum = least_error = torch.full_like(low, torch.nan)  # than which nothing is worse
    for cut in _CUTS:
        span = (high - low) * cut
        first = _codes4(groups, span / 15, (low + high - span) / 2)
        sum_codes = _sum(first)
        spread = GROUP * _sum(first.square()) - sum_codes.square()
        slope = (GROUP * _sum(first.mul_(groups)) - sum_codes * total) / spread
        new_scale = torch.where(spread > 0, slope, 0 * span).to(narrow).float()
        new_minimum = ((total - new_scale * sum_codes) / GROUP).to(narrow).float()
        new_codes = _codes4(groups, new_scale, new_minimum)
        error = _sum((new_codes * new_scale).add_(new_minimum).sub_(groups).square_())
        worse = error >= least_error
        codes = torch.where(worse, codes, new_codes)
        scale, minimum = torch.where(worse, scale, new_scale), torch.where(worse, minimum, new_minimum)
        least_error = torch.where(worse, least_error, error)
    return codes, scale, minimum


def _sum(values_GN: Tensor) -> Tensor:
    """Of each group, in its order: that of torch's own sums depends on size and CPU, and nodes must agree on codes."""
    total = values_GN[0].clone()
    for value_N in values_GN[1:]:
        total += value_N
    return total


def _codes4(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return (groups - minimum).mul_(_inverse(scale)).round_().clamp_(0, 15)


def _inverse(scale: Tensor) -> Tensor:
    """Zero of zero: a group whose values are all alike."""
    return torch.where(scale == 0, scale, 1 / scale)


_FITS = {4: _fit4, 8: _fit8}
