"""Memory for what is large and read in small pieces: in huge pages, where the system has them."""

import contextlib
import mmap


def map_memory(num_bytes: int) -> mmap.mmap:
    """Fresh zeroed memory, of which nothing is taken before it is used. Raises: OSError, OverflowError."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
