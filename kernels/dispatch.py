"""Which kernels run on which device: the one place that decides."""

import logging
from typing import Literal

import torch

from kvrelay.kernels.base import Kernels
from kvrelay.kernels.cpu.build import NotBuiltError
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import ReferenceKernels

KernelsChoice = Literal["auto", "reference"]

log = logging.getLogger(__name__)


def get_kernels(device: torch.device, choice: KernelsChoice = "auto", nice: int = 0) -> Kernels:
    """The kernels for a device, on as many threads as torch: compiled ones on a CPU with a compiler, else the
    reference, which runs wherever torch does. `nice`: of the threads that are started."""
    if choice == "auto" and device.type == "cpu":
        try:
            return CpuKernels(torch.get_num_threads(), nice)
        except NotBuiltError as error:
            # `kvrelay_fields`: where kvrelay's log format looks for values.
            fields = {"reason": str(error), "instead": "plain torch, which is several times slower"}
            log.warning("kernels_not_built", extra={"kvrelay_fields": fields})
    return ReferenceKernels()
