"""Which kernels a device gets."""

import sys

import pytest
import torch

from kvrelay.kernels.cpu.build import NotBuiltError
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.dispatch import get_kernels
from kvrelay.kernels.reference import ReferenceKernels


def test_a_gpu_gets_triton_s_kernels_where_triton_is_installed() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert type(get_kernels(torch.device("cuda"))).__name__ == "TritonKernels"


def test_a_gpu_gets_the_reference_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert type(get_kernels(torch.device("cuda"))) is ReferenceKernels


def test_a_cpu_gets_compiled_kernels_where_they_can_be_had() -> None:
    try:
        CpuKernels(1)
    except NotBuiltError as error:
        pytest.skip(f"no compiled kernels: {error}")
    assert type(get_kernels(torch.device("cpu"))) is CpuKernels


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whoever_asks_for_the_reference_gets_it(device: str) -> None:
    assert type(get_kernels(torch.device(device), "reference")) is ReferenceKernels
