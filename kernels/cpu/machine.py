"""A team of threads that runs programs: lists of operations over buffers, one call for all of them."""

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.base import Draw, QuantisedWeight
from kvrelay.kernels.cpu import native
from kvrelay.kernels.cpu.build import load
from kvrelay.kernels.cpu.native import Batch, Op
from kvrelay.kernels.memory import map_memory

_CHUNK_BYTES = 64 * 2**20  # what is not used of it takes no memory
_ALIGNMENT = 64


class _WeightMemory:
    """Room for packed weights in huge pages, where the system has them: a core then reads half as fast again."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Zeroed bytes, which live for as long as somebody has them or others of their chunk."""
        if self._chunk is None or self._used + num_bytes > len(self._chunk):
            self._chunk = map_memory(max(_CHUNK_BYTES, num_bytes))
            self._used = 0
        taken = torch.frombuffer(self._chunk, dtype=torch.uint8, count=num_bytes, offset=self._used)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


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
        self._memory = _WeightMemory()
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

    def scan(self, x_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of contiguous floats: each row's largest, the first place that has it, and whether all are finite."""
        num_rows, size = x_RV.shape
        largest, places = x_RV.new_empty(num_rows), x_RV.new_empty(num_rows, dtype=torch.int64)
        finite = x_RV.new_empty(num_rows, dtype=torch.bool)
        self._compiled.kvrelay_scan(
            self._machine, x_RV.data_ptr(), num_rows, size, largest.data_ptr(), places.data_ptr(), finite.data_ptr()
        )
        return largest, places, finite

    def draw(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[list[int]]:
        """The tokens that some draws from contiguous logits give."""
        numbers = [number for draw in draws for number in draw.numbers]
        ids = torch.empty(len(numbers), dtype=torch.int64)
        told, first = (native.Draw * len(draws))(), 0
        for to, draw in zip(told, draws, strict=True):
            to.row, to.scale, to.min_p, to.top_p, to.top_k = draw.row, draw.scale, draw.min_p, draw.top_p, draw.top_k
            to.first, to.count = first, len(draw.numbers)
            first += len(draw.numbers)
        self._compiled.kvrelay_draw(
            self._machine,
            logits_RV.data_ptr(),
            logits_RV.shape[1],
            told,
            len(draws),
            (ctypes.c_double * len(numbers))(*numbers),
            ids.data_ptr(),
        )
        drawn = ids.tolist()
        return [drawn[to.first : to.first + to.count] for to in told]

    def total_weights(self, logits_RV: Tensor) -> Tensor:
        """What each row of contiguous logits weighs."""
        num_rows, size = logits_RV.shape
        totals = logits_RV.new_empty(num_rows, dtype=torch.int64)
        self._compiled.kvrelay_total_weights(self._machine, logits_RV.data_ptr(), num_rows, size, totals.data_ptr())
        return totals

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        """The ids of the largest of each row of contiguous logits, in their order."""
        num_rows, size = logits_RV.shape
        ids = logits_RV.new_empty(num_rows, count, dtype=torch.int64)
        if count:
            self._compiled.kvrelay_likeliest(self._machine, logits_RV.data_ptr(), num_rows, size, count, ids.data_ptr())
        return ids

    def row_stride(self, dtype: torch.dtype, num_inputs: int) -> int:
        """Elements from one row to the next that a product's input needs: zeros from its end up to there."""
        return int(self._compiled.kvrelay_row_stride(native.DTYPES[dtype], num_inputs))

    def pack(self, weight_OC: Tensor) -> Tensor:
        """A contiguous weight in the products' layout: bytes."""
        num_outputs, num_inputs = weight_OC.shape
        dtype = native.DTYPES[weight_OC.dtype]
        packed = self._memory.take(self._compiled.kvrelay_packed_bytes(dtype, num_outputs, num_inputs))
        self._compiled.kvrelay_pack(
            self._machine, dtype, weight_OC.data_ptr(), num_outputs, num_inputs, packed.data_ptr()
        )
        return packed

    def pack_quantised(self, weight: QuantisedWeight) -> tuple[Tensor, native.Form]:
        """A quantised weight in the products' layout, and what they have to know of it."""
        num_outputs, num_inputs = weight.codes.shape
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minimums = None if weight.minimums is None else weight.minimums.contiguous()
        form = native.Form(
            bits=weight.bits,
            group=weight.group,
            half=scales.dtype == torch.float16,
            minimums=minimums is not None,
            first_code=0 if minimums is not None else -8,
        )
        dtype = native.DTYPES[weight.dtype]
        packed = self._memory.take(self._compiled.kvrelay_quantised_bytes(dtype, form, num_outputs, num_inputs))
        self._compiled.kvrelay_pack_quantised(
            self._machine,
            dtype,
            form,
            codes.data_ptr(),
            scales.data_ptr(),
            None if minimums is None else minimums.data_ptr(),
            num_outputs,
            num_inputs,
            packed.data_ptr(),
        )
        return packed, form


def program(ops: Sequence[Op]) -> ctypes.Array[Op]:
    return (Op * len(ops))(*ops)
