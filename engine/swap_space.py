"""Host memory for the KV of sequences that gave way, as numbers: which of its blocks are taken.

A host block holds the bytes of one block of the pool, and is never shared: each sequence that is swapped out has its
own copy of all that it had computed. Knows no memory and no sequence. Owned by the engine thread.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStatistics:
    """A snapshot, and counters since the start."""

    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_swapped: int = 0  # sequences that wait in host memory now
    num_swapped_out: int = 0
    num_swapped_in: int = 0


class SwapSpace:
    """`num_blocks` host blocks, free or taken; 0: no preempted sequence is swapped."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: memory that was used before is faster than fresh
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take host blocks, of which the plan has counted that there are enough."""
        assert num_blocks <= self.num_free, f"{num_blocks} host blocks wanted, {self.num_free} are free"
        host_block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        self._taken.update(host_block_ids)
        return host_block_ids

    def release(self, host_block_ids: Iterable[int]) -> None:
        """Give host blocks back."""
        for host_block_id in host_block_ids:
            assert host_block_id in self._taken, f"host block {host_block_id} is released, but not taken"
            self._taken.remove(host_block_id)
            self._free.append(host_block_id)

    def check_integrity(self) -> None:
        """Raises: AssertionError where a host block is free and taken, or neither. O(host blocks)."""
        assert sorted([*self._free, *self._taken]) == list(range(self.num_blocks)), "a host block is lost or doubled"
