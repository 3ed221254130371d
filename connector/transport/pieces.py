"""Cuts and joins a grant's copies into pieces, as views of P's pool. Pure, and lazy: no block's turn comes early."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from kvrelay.connector.transport.base import Copy, Region
from kvrelay.connector.wire import MAX_PIECE_BYTES

PIECE_BYTES = MAX_PIECE_BYTES
MAX_VIEWS = 1023  # and a header: IOV_MAX, what the kernel takes in one call


@dataclass(slots=True)
class Piece:
    """Bytes that lie one after another in the grant's run, from wherever they lie in the pool."""

    offset: int
    size: int
    views: list[memoryview]


def flat(region: Region) -> memoryview:
    """The whole pool as one run of bytes."""
    return memoryview(region.reshape(-1)).cast("B")


def cutter(region: Region) -> Callable[[Iterable[Copy]], Iterator[Piece]]:
    """`cut`, for copies from this pool."""
    return partial(cut, pool=flat(region), block_bytes=region.shape[1])


def cut(copies: Iterable[Copy], pool: memoryview, block_bytes: int) -> Iterator[Piece]:
    """Pieces as large as allowed, of copies whose places in the grant follow each other as the copies do."""
    offset = size = 0
    views: list[memoryview] = []
    for copy in copies:
        at = copy.index * block_bytes + copy.start
        start = copy.source_block * block_bytes + copy.start
        num_left = copy.size
        while num_left:
            if size == PIECE_BYTES or offset + size != at or len(views) == MAX_VIEWS:
                if views:
                    yield Piece(offset, size, views)
                offset, size, views = at, 0, []
            num_bytes = num_left if num_left <= PIECE_BYTES - size else PIECE_BYTES - size
            views.append(pool[start : start + num_bytes])
            size += num_bytes
            at += num_bytes
            start += num_bytes
            num_left -= num_bytes
    if views:
        yield Piece(offset, size, views)


def advance(views: list[memoryview], size: int) -> list[memoryview]:
    """What is left of the views behind their first `size` bytes."""
    done = 0
    for view in views:
        if size < len(view):
            break
        size -= len(view)
        done += 1
    left = views[done:]
    if size:
        left[0] = left[0][size:]
    return left
