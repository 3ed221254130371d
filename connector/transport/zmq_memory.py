"""Where ZMQ's frames lie: malloc keeps the memory of those that are gone for those that come."""

import contextlib
import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 2**26  # at the end of a heap
_MAPPED_BYTES = 2**25  # from here on memory is the kernel's own, and goes back to it at once


@cache
def keep_freed_memory() -> None:
    """For the whole process, once.

    libzmq takes each frame from malloc and gives it back. glibc then returns a frame's megabyte to the kernel, and the
    next one is filled at the speed at which fresh pages are zeroed, a fifth of memcpy's. These are the limits to which
    glibc raises its own by itself once a process has freed a block of 32 MiB; without glibc nothing happens.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
