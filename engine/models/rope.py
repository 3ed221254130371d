"""Rotary position embedding: the angle of each pair of a head's elements at each position."""

import math

import torch
from torch import Tensor

from kvrelay.engine.models.options import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


class Rope:
    """Cosines and sines of the positions of a batch, made anew for each: a table would have to know the longest."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.frequencies = frequencies(config).to(device)
        self.magnitude = config.magnitude

    def cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Both [T, R] in float32.

        The angle is a float32, as everywhere else; its cosine is taken in float64 and rounded, so that it does not
        depend on where in the batch the position stands.
        """
        angles = (positions_T.float()[:, None] * self.frequencies).double()
        return angles.cos().float() * self.magnitude, angles.sin().float() * self.magnitude


def frequencies(config: RopeConfig) -> Tensor:
    """[R]: the angle of each pair at position 1, in float32 as checkpoints were trained."""
    exponents = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
    waves = config.theta**exponents
    match config.scaling:
        case None:
            return 1.0 / waves
        case LinearScaling(factor=factor):
            return 1.0 / waves / factor
        case LongRopeScaling(divisors=divisors):
            return 1.0 / (torch.tensor(divisors) * waves)
        case Llama3Scaling():
            return _llama3(1.0 / waves, config.scaling)
        case YarnScaling():
            return _yarn(1.0 / waves, config.scaling, config.theta)


def _llama3(unscaled_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    num_turns = scaling.original_context * unscaled_R / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((num_turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * unscaled_R / scaling.factor + kept * unscaled_R


def _yarn(unscaled_R: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    num_pairs = len(unscaled_R)

    def pair_that_turns(num_turns: float) -> float:
        """The pair, as a real number, that turns so often within the original context."""
        return num_pairs * math.log(scaling.original_context / (num_turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first if last != first else 0.001
    scaled = ((torch.arange(num_pairs) - first) / width).clamp(0, 1)
    return scaled * unscaled_R / scaling.factor + (1 - scaled) * unscaled_R
