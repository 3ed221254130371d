"""KV from P's form into the one in which it travels, and from there into D's: numpy over bytes, any thread.

bfloat16 is handled as the upper half of a float32's bits, rounded to the nearest, ties to even. Rounding is one pass
over integers: numpy knows no bfloat16 and no fp8. A scale is the largest magnitude of its head_dim elements over the
largest of the format; where that is infinite or no number, the elements come out as NaN: a fault is not made to vanish.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.connector.base import TokenRange
from kvrelay.connector.transit import SCALED, Transit
from kvrelay.connector.transport.base import Region
from kvrelay.engine.kv_layout import KVLayout

Floats = NDArray[np.float32]
Bits = NDArray[Any]

_MAX_INT8, _MAX_FP8 = 127.0, 448.0
_FP8_SHIFT = np.float32(2.0**-120)  # e4m3's smallest normal number, 2^-6, becomes float32's
_SMALLEST = np.float32(2.0**-100)  # below it a reciprocal would overflow


def stored_dtype(name: str) -> "np.dtype[Any]":
    """The elements of a pool, as numpy sees them."""
    return np.dtype({"bfloat16": np.uint16}.get(name, name))


def to_float32(bits: Bits, dtype: str) -> Floats:
    """Exact."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.astype(np.float32)


def from_float32(values: Floats, dtype: str) -> Bits:
    """To the nearest, ties to even."""
    if dtype != "bfloat16":
        return values.astype(stored_dtype(dtype))
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    narrow: Bits = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        narrow[is_nan] = (bits[is_nan] >> np.uint32(16)) | np.uint32(0x40)
    return narrow


def to_int8(values: Floats) -> tuple[Bits, Floats]:
    """(codes, scales): a scale for each run along the last axis."""
    scales, scaled = _scaled(values, _MAX_INT8)
    with np.errstate(invalid="ignore"):
        return np.rint(scaled, out=scaled).astype(np.int8), scales


def to_fp8(values: Floats) -> tuple[Bits, Floats]:
    """(codes of e4m3, scales): a scale for each run along the last axis."""
    scales, scaled = _scaled(values, _MAX_FP8)
    return encode_e4m3(scaled), scales


def from_int8(codes: Bits, scales: Floats) -> Floats:
    values: Floats = codes.view(np.int8).astype(np.float32)
    values *= scales[..., None]
    return values


def from_fp8(codes: Bits, scales: Floats) -> Floats:
    values = decode_e4m3(codes)
    values *= scales[..., None]
    return values


def encode_e4m3(values: Floats) -> Bits:
    """Of finite values within [-448, 448], to the nearest, ties to even. Their exponents are moved to where float32
    has as few subnormals as e4m3, so that its upper bits, rounded, are the code."""
    bits = (values * _FP8_SHIFT).view(np.uint32)
    codes = bits >> np.uint32(20)
    codes &= np.uint32(1)
    codes += np.uint32(0x7FFFF)
    codes += bits
    codes >>= np.uint32(20)
    narrow = codes.astype(np.uint16)  # the sign in bit 11, the rest in bits 0 to 6
    signs = narrow >> np.uint16(4)
    signs &= np.uint16(0x80)
    narrow &= np.uint16(0x7F)
    narrow |= signs
    return narrow.astype(np.uint8)


def decode_e4m3(codes: Bits) -> Floats:
    """Exact; the two codes of NaN, which `encode_e4m3` does not write, come out as 480 and -480."""
    bits = codes.view(np.int8).astype(np.int32)
    bits <<= 20
    bits &= np.int32(0x87F00000 - 2**32)
    values: Floats = bits.view(np.float32)
    values /= _FP8_SHIFT
    return values


def _scaled(values: Floats, largest: float) -> tuple[Floats, Floats]:
    """(scales, values over their scale). Runs that are as good as zero have the scale 0."""
    magnitudes = (values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=-1).view(np.float32)
    scales: Floats = magnitudes / np.float32(largest)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales[magnitudes < _SMALLEST] = 0
        scales[~np.isfinite(magnitudes)] = np.nan
        factors = np.where(magnitudes < _SMALLEST, np.float32(0), np.float32(largest) / magnitudes)
        return scales, values * factors[..., None]


_QUANTISE: dict[str, Callable[[Floats], tuple[Bits, Floats]]] = {"int8": to_int8, "fp8": to_fp8}
_RESTORE: dict[str, Callable[[Bits, Floats], Floats]] = {"int8": from_int8, "fp8": from_fp8}


class Packer:
    """P's half: tokens of P's blocks become one of D's blocks, as it travels."""

    def __init__(self, transit: Transit, region: Region) -> None:
        self._transit = transit
        self._pool = region.view(stored_dtype(transit.source.dtype)).reshape(len(region), *_shape(transit.source))
        self._is_cast = transit.dtype != transit.source.dtype

    def pack(self, block_ids: Sequence[int], tokens: TokenRange, out: Region) -> None:
        """`tokens`: one of D's blocks, as far as the prompt goes; `block_ids`: the blocks that hold them, in order;
        `out`: uint8 [transit.block_bytes]. What lies behind the tokens is zero."""
        transit = self._transit
        if self._is_cast:
            gathered: Bits = np.empty(_shape(transit.target), self._pool.dtype)
            self._gather(block_ids, tokens, gathered)
            _write(to_float32(gathered, transit.source.dtype), transit, out)
        else:
            self._gather(block_ids, tokens, out.view(self._pool.dtype).reshape(_shape(transit.target)))

    def _gather(self, block_ids: Sequence[int], tokens: TokenRange, out: Bits) -> None:
        size = self._transit.source.block_size
        first = tokens.start // size
        for i, block_id in enumerate(block_ids):
            start, end = max(tokens.start, (first + i) * size), min(tokens.end, (first + i + 1) * size)
            at = (first + i) * size
            out[..., start - tokens.start : end - tokens.start, :] = self._pool[block_id][..., start - at : end - at, :]
        out[..., tokens.end - tokens.start :, :] = 0


def widen(transit: Transit, block: Region) -> None:
    """D's half, in place: `block` (uint8 [target.block_bytes]) holds what has come in its beginning."""
    target = transit.target
    come = block[: transit.block_bytes].copy()
    shape = _shape(target)
    if transit.dtype in SCALED:
        codes, scales = come[: transit.num_elements], come[transit.num_elements :].view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            values = _RESTORE[transit.dtype](codes.reshape(shape), scales.reshape(shape[:-1]))
    else:
        values = to_float32(come.view(stored_dtype(transit.dtype)), transit.dtype)
    block[:] = from_float32(values, target.dtype).reshape(-1).view(np.uint8)


def _write(values: Floats, transit: Transit, out: Region) -> None:
    if transit.dtype in SCALED:
        codes, scales = _QUANTISE[transit.dtype](values)
        out[: transit.num_elements] = codes.reshape(-1).view(np.uint8)
        out[transit.num_elements :] = scales.reshape(-1).view(np.uint8)
    else:
        out[:] = from_float32(values, transit.dtype).reshape(-1).view(np.uint8)


def _shape(layout: KVLayout) -> tuple[int, ...]:
    return (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
