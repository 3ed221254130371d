"""Rotary position embedding: the angle of each pair of a head's elements at each position."""

import torch
from torch import Tensor

from kvrelay.engine.models.config import RopeConfig


class Rope:
    """Cosines and sines of the positions of a batch, made anew for each: a table would have to know the longest."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        self._frequencies = 1.0 / (config.theta**exponents)  # [R], in float32 as checkpoints were trained

    def cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Both [T, R] in float32.

        The angle is a float32, as everywhere else; its cosine is taken in float64 and rounded, so that it does not
        depend on where in the batch the position stands.
        """
        angles = (positions_T.float()[:, None] * self._frequencies).double()
        return angles.cos().float(), angles.sin().float()
