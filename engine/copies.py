"""Copies of many pieces of memory in one call, which lets other threads run meanwhile."""

import ctypes
from collections.abc import Callable
from typing import Any

from kvrelay.engine.log import fields, get_logger
from kvrelay.kernels.cpu.build import NotBuiltError, load

Pieces = Any  # numpy array, uint64 [num_pieces, 3], contiguous: source address, target address, size

log = get_logger(__name__)


def get_copy_pieces() -> Callable[[Pieces], None]:
    """The compiled copy, if the kernels are compiled already: this compiles none, for a writer may wait for it. Else
    one memmove a piece."""
    try:
        copy_pieces = load(compiles=False).kvrelay_copy_pieces
    except NotBuiltError as error:
        log.info("copies_one_by_one", extra=fields(reason=str(error)))
        return _copy_one_by_one
    copy_pieces.restype, copy_pieces.argtypes = None, (ctypes.c_void_p, ctypes.c_int64)

    def copy(pieces: Pieces) -> None:
        copy_pieces(pieces.ctypes.data, len(pieces))

    return copy


def _copy_one_by_one(pieces: Pieces) -> None:
    for source, target, size in pieces.tolist():
        ctypes.memmove(target, source, size)
