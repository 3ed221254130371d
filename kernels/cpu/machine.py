"""A team of threads that runs programs: lists of operations over buffers, one call for all of them."""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.cpu import native
from kvrelay.kernels.cpu.build import load
from kvrelay.kernels.cpu.native import Batch, Op


class Machine:
    """The compiled kernels, and the threads they run on. For one caller at a time; its threads sleep between runs."""

    def __init__(self, num_threads: int, nice: int = 0, flags: tuple[str, ...] = ()) -> None:
        """`nice`: of the threads that it starts, all but the calling one; `flags`: see `build.load`.

        Raises: NotBuiltError.
        """
        self._compiled = load(flags)
        native.declare(self._compiled)
        self.num_threads = num_threads
        self._machine = self._compiled.kvrelay_new(num_threads, nice)
        free = weakref.finalize(self, self._compiled.kvrelay_free, self._machine)
        free.atexit = False  # the threads end with the process; one of Python's may still be in a run

    def run(self, program: ctypes.Array[Op], batch: Batch) -> None:
        """Run the operations in their order. What they point to must be alive, and of `batch.num_rows` rows at least.

        Raises: ValueError for a slot outside the pool, with nothing written.
        """
        if self._compiled.kvrelay_run(self._machine, program, len(program), ctypes.byref(batch)):
            slot = max(ctypes.cast(batch.slots, ctypes.POINTER(ctypes.c_int64))[: batch.num_rows])
            pool = batch.pool
            raise ValueError(f"slot {slot} lies outside a pool of {pool.num_blocks} blocks of {pool.block_size}")

    def row_stride(self, dtype: torch.dtype, num_inputs: int) -> int:
        """Elements from one row to the next that a product's input needs: zeros from its end up to there."""
        return int(self._compiled.kvrelay_row_stride(native.DTYPES[dtype], num_inputs))

    def pack(self, weight_OC: Tensor) -> Tensor:
        """A contiguous weight in the products' layout: bytes."""
        num_outputs, num_inputs = weight_OC.shape
        dtype = native.DTYPES[weight_OC.dtype]
        packed = torch.empty(self._compiled.kvrelay_packed_bytes(dtype, num_outputs, num_inputs), dtype=torch.uint8)
        self._compiled.kvrelay_pack(
            self._machine, dtype, weight_OC.data_ptr(), num_outputs, num_inputs, packed.data_ptr()
        )
        return packed


def program(ops: Sequence[Op]) -> ctypes.Array[Op]:
    return (Op * len(ops))(*ops)
