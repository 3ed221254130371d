"""The codes of a GGUF file's quantised tensors as they are, with what they are to be multiplied by and added to.

value = code * scale + minimum, in float32: exactly what the file's own definition gives
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Kind

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Bytes, GgufTensor

_PIECE_BYTES = 2**22  # of the file: unpacked, and on the way there, it takes some ten times as much

Array = np.ndarray[Any, Any]
Parts = tuple[Array, Array, Array | None]  # of some blocks: codes, scales, minimums; one block a row


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [num_outputs, num_inputs]."""

    codes: Array  # int8, a row an output; of 4 bits 0 to 15 with minimums, else -8 to 7
    scales: Array  # float16 or float32, a row an output
    minimums: Array | None
    bits: Literal[4, 8]
    group: int  # inputs that share a scale


def read_codes(tensor: GgufTensor) -> Codes:
    """Raises: ModelError for a type that is not one of these, and for a scale that is no number."""
    if tensor.kind not in _FORMATS:
        known = ", ".join(kind.name for kind in _FORMATS)
        raise ModelError(
            f"{tensor.source.name}: tensor {tensor.name}: type {tensor.kind.name}; quantization = gguf takes {known}"
        )
    form = _FORMATS[tensor.kind]
    num_rows, num_columns = tensor.shape
    found: list[Parts] = []
    for raw in tensor.raw_rows(_PIECE_BYTES):
        blocks = raw.reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])
        with np.errstate(invalid="ignore"):  # infinity times zero: found just below
            parts = form.split(blocks)
        if not all(part is None or np.isfinite(part).all() for part in parts[1:]):
            raise ModelError(f"{tensor.source.name}: tensor {tensor.name}: holds a value that is no number")
        found.append(parts)
    codes, scales = (np.concatenate([parts[i] for parts in found]).reshape(num_rows, -1) for i in (0, 1))
    assert codes.shape[1] == num_columns
    minimums = [parts[2] for parts in found if parts[2] is not None]
    return Codes(
        codes, scales, np.concatenate(minimums).reshape(num_rows, -1) if minimums else None, form.bits, form.group
    )


def is_quantised(kind: Kind) -> bool:
    return kind not in (Kind.F32, Kind.F16, Kind.BF16)


# --- formats: blocks as they lie in a file, [blocks, bytes]


@dataclass(frozen=True, slots=True)
class _Format:
    bits: Literal[4, 8]
    group: int
    split: Callable[[Bytes], Parts]


def _float16(blocks: Bytes, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _digits(packed: Bytes, bits: int, run: int) -> Bytes:
    """Numbers of a few bits: of each `run` bytes first the lowest of all of them, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Of 32 codes, one bit each, in their order."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _less(codes: Bytes, offset: int) -> Array:
    return codes.astype(np.int8) - np.int8(offset)


def _q4_0(blocks: Bytes) -> Parts:
    return _less(_digits(blocks[:, 2:], 4, 16), 8), _float16(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _digits(blocks[:, 4:], 4, 16).view(np.int8), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    return _less(_digits(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6]), 16), _float16(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _digits(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return codes.view(np.int8), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:].view(np.int8), _float16(blocks, 0), None


def _q2_k(blocks: Bytes) -> Parts:
    scales, minimums = blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)
    codes = _digits(blocks[:, 16:80], 2, 32)
    return codes.view(np.int8), _times(blocks, 80, scales), -_times(blocks, 82, minimums)


def _q3_k(blocks: Bytes) -> Parts:
    scales = _digits(blocks[:, 96:104], 4, 8) | _digits(blocks[:, 104:108], 2, 4) << np.uint8(4)
    high = _digits(blocks[:, :32], 1, 32) << np.uint8(2)
    codes = _less(_digits(blocks[:, 32:96], 2, 32) | high, 4)
    return codes, _times(blocks, 108, _less(scales, 32)), None


def _q4_k(blocks: Bytes) -> Parts:
    scales, minimums = _scales_and_minimums(blocks)
    return _digits(blocks[:, 16:], 4, 32).view(np.int8), scales, minimums


def _q5_k(blocks: Bytes) -> Parts:
    scales, minimums = _scales_and_minimums(blocks)
    high = _digits(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return (_digits(blocks[:, 48:], 4, 32) | high).view(np.int8), scales, minimums


def _q6_k(blocks: Bytes) -> Parts:
    high = _digits(blocks[:, 128:192], 2, 32) << np.uint8(4)
    codes = _less(_digits(blocks[:, :128], 4, 64) | high, 32)
    return codes, _times(blocks, 208, np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)), None


def _times(blocks: Bytes, at: int, factors: Array) -> Array:
    return _float16(blocks, at).astype(np.float32) * factors.astype(np.float32)


def _scales_and_minimums(blocks: Bytes) -> tuple[Array, Array]:
    """Of Q4_K and Q5_K: eight of six bits each, the last four's upper bits above the first four's six."""
    low, high, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    six, four, upper = np.uint8(63), np.uint8(15), np.uint8(48)
    scales = np.concatenate([low & six, rest & four | low >> np.uint8(2) & upper], axis=1)
    minimums = np.concatenate([high & six, rest >> np.uint8(4) | high >> np.uint8(2) & upper], axis=1)
    return _times(blocks, 0, scales), -_times(blocks, 2, minimums)


_FORMATS = {
    Kind.Q4_0: _Format(4, 32, _q4_0),
    Kind.Q4_1: _Format(4, 32, _q4_1),
    Kind.Q5_0: _Format(8, 32, _q5_0),
    Kind.Q5_1: _Format(8, 32, _q5_1),
    Kind.Q8_0: _Format(8, 32, _q8_0),
    Kind.Q2_K: _Format(4, 16, _q2_k),
    Kind.Q3_K: _Format(4, 16, _q3_k),
    Kind.Q4_K: _Format(4, 32, _q4_k),
    Kind.Q5_K: _Format(8, 32, _q5_k),
    Kind.Q6_K: _Format(8, 16, _q6_k),
}
