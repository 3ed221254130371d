"""Memory that processes of one host share: a memfd, mapped so that huge pages can hold it.

A memfd's size is sealed when it is made: nobody who holds the descriptor can cut it off under those who have mapped it.
Shared memory gets no huge pages by itself where `shmem_enabled` is `never`, as it is by default: they are asked for
with MADV_COLLAPSE, 2 MiB at a time, in which one page has been touched. So no byte changes, whoever writes meanwhile.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

HUGE_PAGE_BYTES = 2 * 2**20
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Libc:
    """mmap and its like as plain calls: they let other threads run, and name addresses."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mmap.restype = pointer
        libc.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_long)
        libc.munmap.argtypes = (pointer, size)
        libc.madvise.argtypes = (pointer, size, integer)
        self._mmap, self.unmap, self.advise = libc.mmap, libc.munmap, libc.madvise

    def map(self, address: int | None, num_bytes: int, flags: int, descriptor: int = -1) -> int:
        """Raises: OSError."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE if descriptor >= 0 else 0
        found = self._mmap(address, num_bytes, protection, flags, descriptor, 0)
        if found is None or found == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(found)


class SharedMemory:
    """`num_bytes` of a memfd, mapped. `address` and `buffer` are the same memory."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """The descriptor is this object's from now on. Raises: OSError."""
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.num_small_pieces = 0  # of HUGE_PAGE_BYTES, for which `populate` got no huge page
        self._libc = _Libc()
        try:
            self.address = self._map()
        except OSError:
            os.close(descriptor)
            raise
        # A child of a fork must not hold what this process has given up.
        self._libc.advise(self.address, num_bytes, _MADV_DONTFORK)
        kind: Any = type("_Bytes", (ctypes.c_uint8 * num_bytes,), {})  # a class of ours, for weak references to it
        self.buffer: Any = kind.from_address(self.address)
        self._free = weakref.finalize(self.buffer, _free, self._libc.unmap, self.address, num_bytes, descriptor)
        self._free.atexit = False

    @classmethod
    def create(cls, num_bytes: int, name: str) -> "SharedMemory":
        """New zeroed memory, of which nothing is taken before it is used. Raises: OSError, OverflowError."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except (OSError, OverflowError):
            os.close(descriptor)
            raise
        return cls(descriptor, num_bytes)

    def unmap(self) -> None:
        """Give the memory up now. Nobody may have a view of `buffer` any more."""
        self._free()

    def populate(self, is_over: Callable[[], bool]) -> None:
        """Fetch all pages, huge ones where they are to be had, until `is_over`. To be called once, on any thread."""
        for start in range(self.address, self.address + self.num_bytes, HUGE_PAGE_BYTES):
            size = min(HUGE_PAGE_BYTES, self.address + self.num_bytes - start)
            if is_over() or self._libc.advise(start, min(size, mmap.PAGESIZE), _MADV_POPULATE_WRITE):
                return
            is_whole = size == HUGE_PAGE_BYTES  # the last may be less
            if not is_whole or self._libc.advise(start, size, _MADV_COLLAPSE):
                self.num_small_pieces += is_whole
                self._libc.advise(start, size, _MADV_POPULATE_WRITE)

    def _map(self) -> int:
        """At a multiple of HUGE_PAGE_BYTES: room is reserved there first, then mapped over. Raises: OSError."""
        room = self.num_bytes + HUGE_PAGE_BYTES
        start = self._libc.map(None, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = -(-(address + self.num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._libc.map(address, self.num_bytes, mmap.MAP_SHARED | _MAP_FIXED, self.descriptor)
        except OSError:
            self._libc.unmap(start, room)
            raise
        if address > start:
            self._libc.unmap(start, address - start)
        if start + room > end:
            self._libc.unmap(end, start + room - end)
        return address


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can cut this memory off any more."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return False
    return seals & _SIZE_SEALS == _SIZE_SEALS


def why_not_huge() -> str:
    """What keeps shared memory out of huge pages here; nothing, if it gets them."""
    try:
        memory = SharedMemory.create(HUGE_PAGE_BYTES, "kvrelay-probe")
    except OSError as error:
        return f"no shared memory: {error}"
    memory.populate(lambda: False)
    reason = "this system has no huge pages for shared memory (MADV_COLLAPSE, Linux 6.1)"
    found = reason if memory.num_small_pieces else ""
    memory.unmap()
    return found


def lower_priority() -> None:
    """Of the calling thread alone: computing comes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _free(unmap: Callable[[int, int], int], address: int, num_bytes: int, descriptor: int) -> None:
    unmap(address, num_bytes)
    with contextlib.suppress(OSError):
        os.close(descriptor)
