"""A checkpoint's tensors, from safetensors files: mapped, each taken once, none left over.

Files are mapped, so that loading costs no copy where the dtype is already right, and two nodes on one machine share
the pages. Where a tensor is converted, or a kernel keeps a copy of its own, the file's pages are given back, so that
weights are in memory once. A mapped file must not change while a node runs.
"""

import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.errors import ModelError
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.weight_files import StoredTensor, read_tensors
from kvrelay.kernels.base import QuantisedWeight

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MADV_POPULATE_READ = 22  # Linux 5.14; on an older kernel pages come at their first use
_READ_BYTES = 16 * 2**20  # between two moves of the progress bar
_BAR_DELAY_S = 1.0  # what takes less needs no bar

Matrix = Tensor | QuantisedWeight

_log = get_logger(__name__)


class MatrixSource(Protocol):
    """Gives the matrices of a checkpoint, which are the weights of products, in another form: quantised."""

    def stored(self, name: str) -> QuantisedWeight | None:
        """One that is there so. Raises: ModelError."""

    def made(self, weight_OC: Tensor, *, is_head: bool) -> Matrix:
        """One that is not."""


class Checkpoint:
    """The tensors of a model folder, handed out by name."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, source: MatrixSource | None = None
    ) -> None:
        """Read every file's header, and have the system start to read the files. `source`: of matrices; by default
        they are the checkpoint's own. Raises: ModelError."""
        self._path = path
        self._dtype = dtype
        self._device = device
        self._source = source
        self._clock = MonotonicClock()
        self._started = self._clock.now()
        self._tensors = read_tensors(path)
        self._files = {file: _MappedFile(file) for file in dict.fromkeys(t.file for t in self._tensors.values())}
        self._read_bytes = 0
        self._bar = _progress_bar(sum(stored.size_bytes for stored in self._tensors.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype asked for. Its shape is checked before memory is taken. Each can be taken once.

        Raises: ModelError.
        """
        stored = self._find(name, shape)
        if stored.dtype not in _DTYPES:
            raise ModelError(f"{self._path}: tensor {name} is {stored.dtype}; supported: {', '.join(_DTYPES)}")
        mapped = self._files[stored.file].map(stored, self._count)
        return mapped.to(self._device, self._dtype)

    def take_matrix(self, name: str, num_outputs: int, num_inputs: int, *, is_head: bool = False) -> Matrix:
        """The same of a product's weight, which may be quantised."""
        if self._source is None:
            return self.take(name, num_outputs, num_inputs)
        found = self._quantised(name, num_outputs, num_inputs)
        if found is not None:
            self._find(name, (num_outputs, num_inputs))
            return found
        return self._source.made(self.take(name, num_outputs, num_inputs), is_head=is_head)

    def head_of(self, name: str, embedding_VC: Tensor) -> Matrix:
        """An embedding, which has been taken under this name, as the weight of the head. Raises: ModelError."""
        if self._source is None:
            return embedding_VC
        return self._quantised(name, *embedding_VC.shape) or self._source.made(embedding_VC, is_head=True)

    def _quantised(self, name: str, *shape: int) -> QuantisedWeight | None:
        """What the source has, if it is what it was when the checkpoint was made of it. Raises: ModelError."""
        assert self._source is not None
        found = self._source.stored(name)
        if found is not None and found.shape != shape:
            raise ModelError(f"{self._path}: tensor {name} has shape {list(found.shape)} where it came from")
        return found

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Raises: ModelError."""
        stored = self._tensors.pop(name, None)
        if stored is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        if stored.shape != shape:
            raise ModelError(
                f"{self._path}: tensor {name} has shape {list(stored.shape)}; config.json asks for {list(shape)}"
            )
        return stored

    def finish(self, may_remain: Callable[[str], bool]) -> None:
        """Raises: ModelError if a tensor was not taken and may not remain: the model is another than the one built."""
        unused = sorted(name for name in self._tensors if not may_remain(name))
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise ModelError(f"{self._path}: tensors that this architecture does not use: {shown}")
        self._tensors.clear()
        self._files.clear()
        if self._bar is not None:
            self._bar.close()
        seconds = max(self._clock.now() - self._started, 1e-9)
        rate = self._read_bytes / 1e9 / seconds
        _log.info("weights_loaded", extra=fields(size_bytes=self._read_bytes, seconds=seconds, rate_gb_s=rate))

    def _count(self, num_bytes: int) -> None:
        self._read_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)


class _MappedFile:
    """A file as memory. Pages that are read stay the system's, and shared; a write would make a private copy."""

    def __init__(self, file: Path) -> None:
        """Raises: ModelError."""
        self._file = file
        try:
            with file.open("rb") as content:
                # In the order of its bytes, ahead of the tensors that are taken in the model's: where the system reads
                # ahead little by itself, a cold load took 1.2 to 1.7 times as long without.
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                self._memory = mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"{file}: cannot be mapped: {error.strerror}") from error

    def map(self, stored: StoredTensor, count: Callable[[int], None]) -> Tensor:
        """A tensor over the file's bytes, which have been read: `count` is told as they are. Its pages are given back
        when nobody has the tensor any more. Raises: ModelError."""
        dtype = _DTYPES[stored.dtype]
        if not stored.size_bytes:
            return torch.empty(stored.shape, dtype=dtype)
        for start in range(stored.offset, stored.offset + stored.size_bytes, _READ_BYTES):
            size = min(_READ_BYTES, stored.offset + stored.size_bytes - start)
            self._read(start, size)
            count(size)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=stored.size_bytes, offset=stored.offset)
        if stored.offset % dtype.itemsize:
            flat = flat.clone()  # a header of odd length: legal, and no address for a number
        tensor = flat.view(dtype).view(stored.shape)
        weakref.finalize(tensor, self._give_back, stored.offset, stored.size_bytes).atexit = False
        return tensor

    def _read(self, start: int, size: int) -> None:
        first = start - start % mmap.PAGESIZE
        try:
            self._memory.madvise(_MADV_POPULATE_READ, first, start + size - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ModelError(f"{self._file}: cannot be read: {error.strerror}") from error

    def _give_back(self, start: int, size: int) -> None:
        """Let go of the pages that lie wholly within; whoever still reads there gets them from the file again."""
        first = start + -start % mmap.PAGESIZE
        size = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, first, size)


def _progress_bar(total_bytes: int) -> Any:
    """On a terminal, for a load that takes long; else None."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(desc="loading weights", total=total_bytes, unit="B", unit_scale=True, delay=_BAR_DELAY_S, leave=False)
