"""What a benchmark of transfers moves: blocks whose bytes say where they are from, in an order that both sides know."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.connector.transport.base import Region
from kvrelay.engine.errors import Internal
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.shared_memory import SharedMemory

BLOCK_SIZE = 16
_UNIT_BYTES = 512  # of a layout below, by head_dim 1


@dataclass(frozen=True, slots=True)
class Case:
    """So many bytes in blocks of one size, in a row or scattered over both pools."""

    name: str
    block_bytes: int
    num_blocks: int
    is_scattered: bool

    @property
    def size_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            num_layers=8,
            num_kv_heads=1,
            head_dim=self.block_bytes // _UNIT_BYTES,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
        )

    def region(self, pool: Region) -> Region:
        """A part of a pool as so many blocks."""
        region: Region = pool[: self.size_bytes].reshape(self.num_blocks, self.block_bytes)
        return region

    def order(self, side: int) -> list[int]:
        """Block ids in the order of the prompt; `side` 0: P's, 1: D's."""
        if not self.is_scattered:
            return list(range(self.num_blocks))
        order: list[int] = np.random.default_rng((side, self.block_bytes)).permutation(self.num_blocks).tolist()
        return order


def new_pool(size_bytes: int) -> Region:
    """Memory whose pages are there: the first touch of a page costs more than the copy that is to be measured."""
    return np.zeros(size_bytes, np.uint8) + np.uint8(0)


def new_shared_pool(size_bytes: int) -> tuple[Region, int]:
    """The same in a memfd, which lives as long as the pool; in huge pages, if there are any. Raises: OSError."""
    memory = SharedMemory.create(size_bytes, "kvrelay-bench")
    memory.populate(lambda: False)
    return np.frombuffer(memory.buffer, np.uint8), memory.descriptor


def fill(pool: Region) -> None:
    """Each word of eight bytes says its place."""
    words = pool[: len(pool) // 8 * 8].view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)


def check(target: Region, case: Case, num_blocks: int) -> None:
    """Raises: Internal unless the first blocks of the prompt are in `target` as `fill` made them in the source."""
    words = np.arange(case.block_bytes // 8, dtype=np.uint64)
    for source_id, target_id in list(zip(case.order(0), case.order(1), strict=True))[:num_blocks]:
        if not np.array_equal(target[target_id].view(np.uint64), words + np.uint64(source_id * len(words))):
            raise Internal(f"{case.name}: block {source_id} did not arrive in block {target_id}")


def make_cases(size_bytes: int, block_bytes: Sequence[int]) -> tuple[Case, ...]:
    """One buffer, and scattered blocks of each size."""
    megabyte = 2**20
    return (
        Case("contiguous", megabyte, max(1, size_bytes // megabyte), is_scattered=False),
        *(Case(f"{size / 1024:g} KiB", size, max(1, size_bytes // size), is_scattered=True) for size in block_bytes),
    )
