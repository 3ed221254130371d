"""Which kernels run on which device: the one place that decides."""

import torch

from kvrelay.kernels.base import Kernels
from kvrelay.kernels.reference import ReferenceKernels


def get_kernels(device: torch.device) -> Kernels:
    """The kernels for a device; the reference runs wherever torch does."""
    return ReferenceKernels()
