"""Every set of kernels that the tests hold to the same rules."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch

from kvrelay.kernels.base import Kernels
from kvrelay.kernels.cpu.build import NotBuiltError, cpu_flags
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import ReferenceKernels


@dataclass(frozen=True)
class KernelSet:
    name: str
    make: Callable[[], Kernels]
    is_interpreted: bool = False  # by numpy: milliseconds a program, and float32 is cut off to bfloat16, not rounded
    refuses_slots: bool = True  # outside the pool; on a GPU they only write nothing

    @property
    def threads(self) -> tuple[int, ...]:
        """Numbers of torch's threads that may make a difference."""
        return (1,) if self.is_interpreted else (1, 2, 3, 7)


class AsManyThreadsAsTorch:
    """Compiled kernels on torch's number of threads."""

    def __init__(self, flags: tuple[str, ...]) -> None:
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu_kernels(torch.get_num_threads(), self._flags), name)


@cache
def cpu_kernels(num_threads: int, flags: tuple[str, ...] = ()) -> CpuKernels:
    """Skips the test where nothing can be compiled."""
    try:
        return CpuKernels(num_threads, flags=flags)
    except NotBuiltError as error:
        pytest.skip(f"no compiled kernels: {error}")


def _triton_by_its_interpreter() -> Kernels:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=0: these tests hold Triton's interpreter")
    from kvrelay.kernels.triton.kernels import TritonKernels

    return TritonKernels()


# The first is what the others are compared with.
KERNEL_SETS = (
    KernelSet("reference", ReferenceKernels),
    KernelSet("cpu", lambda: cast(Kernels, AsManyThreadsAsTorch(()))),
    KernelSet("triton", _triton_by_its_interpreter, is_interpreted=True, refuses_slots=False),
)

_AVX2 = {"avx2", "fma", "bmi2", "f16c"}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}


def _for(march: str, needs: set[str]) -> KernelSet:
    """The CPU's kernels, compiled for another CPU that this one can stand for."""

    def make() -> Kernels:
        if platform.machine() != "x86_64" or not needs <= set(cpu_flags()):
            pytest.skip(f"this CPU cannot run code for {march}")
        return cast(Kernels, AsManyThreadsAsTorch((f"-march={march}",)))

    return KernelSet(f"cpu as {march}", make)


# Each way through vec.h and tile.h; Intel's matrix tiles are what "cpu" itself takes where there are any.
CPU_BUILDS = (
    _for("x86-64", set()),
    _for("haswell", _AVX2),
    _for("skylake-avx512", _AVX2 | _AVX512),
    _for("cooperlake", _AVX2 | _AVX512 | {"avx512_vnni", "avx512_bf16"}),
)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
