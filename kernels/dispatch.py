"""Which kernels run on which device: the one place that decides."""

import logging
from importlib.util import find_spec
from typing import Literal

import torch

from kvrelay.kernels.base import Kernels
from kvrelay.kernels.cpu.build import NotBuiltError
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import ReferenceKernels

KernelsChoice = Literal["auto", "reference"]

log = logging.getLogger(__name__)


def get_kernels(device: torch.device, choice: KernelsChoice = "auto", nice: int = 0) -> Kernels:
    """The kernels for a device: compiled ones on a CPU with a compiler, on as many threads as torch; Triton's on a GPU
    where it is installed. Else the reference, which runs wherever torch does. `nice`: of the threads that are started.
    """
    if choice == "auto" and device.type == "cpu":
        try:
            return CpuKernels(torch.get_num_threads(), nice)
        except NotBuiltError as error:
            # `kvrelay_fields`: where kvrelay's log format looks for values.
            fields = {"reason": str(error), "instead": "plain torch, which is several times slower"}
            log.warning("kernels_not_built", extra={"kvrelay_fields": fields})
    if choice == "auto" and device.type == "cuda" and find_spec("triton") is not None:
        from kvrelay.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    return ReferenceKernels()
