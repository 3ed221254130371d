"""The memory of the KV pool: one piece, seen as a tensor by the kernels and as bytes by what moves them. Beside it host
memory for what is swapped out, in blocks of the same size.

Fresh memory costs several times a copy when it is first written, so a thread asks the kernel for the pool's pages in
the background (MADV_POPULATE_WRITE): that changes no byte, and cannot race with the engine or a transfer that writes
there. A pool that other processes are to write into lies in shared memory, in huge pages all the same: where there are
none for it, nothing is shared. Host memory takes no page before it is used: many a node never swaps, and the first copy
too takes a small part of the time of computing that KV again.
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.config import EngineConfig, parse_size
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.shared_memory import HUGE_PAGE_BYTES, SharedMemory, lower_priority, why_not_huge
from kvrelay.kernels.memory import map_memory

_log = get_logger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; on an older kernel pages come at their first use
_POPULATE_BYTES = 16 * 2**20  # a call: the wait of a close, and of whoever else changes the address space meanwhile


class KVCache:
    """The pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, *, num_host_blocks: int = 0, shared: SharedMemory | None = None
    ) -> None:
        """`shared`: num_blocks * block_bytes bytes to use instead of memory of our own.

        Raises: ConfigError if there is not that much memory.
        """
        self.layout = layout
        self._shared = shared
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        num_bytes = num_blocks * layout.block_bytes
        memory = _map(num_bytes, f"{num_blocks} KV blocks") if shared is None else shared.buffer
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
        self._blocks = flat.view(num_blocks, layout.block_bytes)
        self._host_blocks = torch.empty(0, layout.block_bytes, dtype=torch.uint8)
        if num_host_blocks:
            host_memory = _map(num_host_blocks * layout.block_bytes, f"{num_host_blocks} host blocks")
            host = torch.frombuffer(host_memory, dtype=torch.uint8)
            self._host_blocks = host.view(num_host_blocks, layout.block_bytes)
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self.pool: Tensor = flat.view(getattr(torch, layout.dtype)).view(shape)
        self.region: np.ndarray[Any, np.dtype[np.uint8]] = flat.numpy().reshape(num_blocks, layout.block_bytes)
        self._closed = threading.Event()
        self._populating = threading.Thread(
            target=self._populate, args=(flat.data_ptr(), num_bytes), name="kv-populate", daemon=True
        )

    @property
    def region_fd(self) -> int | None:
        """The memfd that holds the pool, if other processes may map it."""
        return None if self._shared is None else self._shared.descriptor

    def populate(self) -> None:
        """Start to fetch the pool's pages in the background."""
        self._populating.start()

    def close(self) -> None:
        """Stop fetching pages. The memory goes when the last view of it does."""
        self._closed.set()
        if self._populating.ident is not None:
            self._populating.join()

    def copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks: (from, to) each, one after the other."""
        for source, target in copies:
            self.pool[target] = self.pool[source]

    def swap_out(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks to host memory: (block, host block) each."""
        for block_id, host_block_id in copies:
            self._host_blocks[host_block_id] = self._blocks[block_id]

    def swap_in(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks back: (host block, block) each."""
        for host_block_id, block_id in copies:
            self._blocks[block_id] = self._host_blocks[host_block_id]

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        """Zero a block's slots [first_slot, block_size), in every layer, keys and values."""
        self.pool[block_id, :, :, :, first_slot:] = 0

    def _populate(self, address: int, num_bytes: int) -> None:
        lower_priority()
        if self._shared is not None:
            self._shared.populate(self._closed.is_set)
            if self._shared.num_small_pieces:
                num_bytes = self._shared.num_small_pieces * HUGE_PAGE_BYTES
                _log.warning(
                    "kv_pool_in_small_pages", extra=fields(num_bytes=num_bytes, size_bytes=self._shared.num_bytes)
                )
            return
        madvise = ctypes.CDLL(None).madvise  # lets other threads run, unlike mmap's own
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start = address - address % mmap.PAGESIZE
        for piece in range(start, address + num_bytes, _POPULATE_BYTES):
            size = min(_POPULATE_BYTES, address + num_bytes - piece)
            if self._closed.is_set() or madvise(piece, size, _MADV_POPULATE_WRITE):
                return


def share_pool(layout: KVLayout, num_blocks: int) -> SharedMemory | None:
    """Memory for a pool that other processes can map; none, and a line in the log, where that would slow the kernels.

    Raises: ConfigError if there is not that much memory.
    """
    if reason := why_not_huge():
        _log.info("kv_pool_not_shared", extra=fields(reason=reason))
        return None
    num_bytes = num_blocks * layout.block_bytes
    try:
        return SharedMemory.create(num_bytes, "kvrelay-pool")
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no memory for {num_blocks} KV blocks, {num_bytes} bytes: {error}") from error


def _map(num_bytes: int, purpose: str) -> mmap.mmap:
    """Fresh memory. Raises: ConfigError if there is not that much."""
    try:
        return map_memory(num_bytes)  # attention reads two KiB here and there: each of another small page
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no memory for {purpose}, {num_bytes} bytes: {error}") from error


def num_blocks_for(config: EngineConfig, layout: KVLayout) -> int:
    """How many blocks the configuration asks for. Raises: ConfigError if it is none."""
    if config.num_blocks:
        return config.num_blocks
    return _blocks_in("kv_cache_size", config.kv_cache_size, layout)


def num_host_blocks_for(config: EngineConfig, layout: KVLayout) -> int:
    """How many blocks of host memory the configuration asks for. Raises: ConfigError if less than one."""
    return _blocks_in("swap_space", config.swap_space, layout) if parse_size(config.swap_space) else 0


def _blocks_in(name: str, size: str, layout: KVLayout) -> int:
    num_blocks = parse_size(size) // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{name} = {size}: less than one block of {layout.block_size} tokens, {layout.block_bytes} bytes"
        )
    return num_blocks
