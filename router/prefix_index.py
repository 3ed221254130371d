"""Which prompts' beginnings a node's cache holds, as far as the node has said, and the names of a prompt's blocks.

A hint for placement and nothing else: a name is 8 bytes of a hash, and what it stands for may be evicted before the
request is there. What is really reused is decided on the node, by whole hashes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.block_hash import chain_block_hashes, root_hash, short_name
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import CacheChange


class PrefixIndex:
    """The names of the blocks in one node's prefix cache: never more than the node has blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._names: set[int] = set()

    @property
    def names(self) -> frozenset[int]:
        return frozenset(self._names)

    def apply(self, change: CacheChange) -> None:
        """Raises: InvalidArgument for more blocks than there are."""
        change.apply_to(self._names)
        if len(self._names) > self._max_blocks:
            raise InvalidArgument("cache.stored", f"{len(self._names)} blocks", f"the node has {self._max_blocks}")

    def num_cached_blocks(self, names: Iterable[int]) -> int:
        """How many of a prompt's first blocks are here, without a gap."""
        num_cached = 0
        for name in names:
            if name not in self._names:
                break
            num_cached += 1
        return num_cached


@dataclass(slots=True)
class PromptBlocks:
    """The names of a prompt's full blocks. A hash is computed when it is first asked for, once: a prompt that no cache
    knows costs one."""

    token_ids: Sequence[int] = ()
    cache_salt: str = ""
    _known: dict[int, tuple[list[int], Iterator[bytes]]] = field(default_factory=dict)  # by block size

    def names(self, block_size: int) -> Iterator[int]:
        """In order of position."""
        if block_size not in self._known:
            hashes = chain_block_hashes(self.token_ids, block_size, root_hash(self.cache_salt))
            self._known[block_size] = [], hashes
        known, hashes = self._known[block_size]
        position = 0
        while True:
            if position == len(known):
                block_hash = next(hashes, None)
                if block_hash is None:
                    return
                known.append(short_name(block_hash))
            yield known[position]
            position += 1
