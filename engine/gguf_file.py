"""A GGUF file as it lies on disk: its metadata, and where each tensor's bytes are. It is checked, not trusted.

    magic, version, number of tensors, number of pairs | key-value pairs | tensors: name, dims, type, offset | data

Counts and lengths are compared with what the file can hold before anything is read, so that a broken header takes
neither memory nor time. A model may come in parts: as GGUF files of their own (`x-00001-of-00004.gguf`), or as one
file cut into slices (`x.gguf.part00`); any one of them stands for all.
"""

import math
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from kvrelay.engine.errors import ModelError

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 2**28  # the largest vocabularies in use take 10 MiB
_MAX_ITEMS = 2**22  # of an array; the same vocabularies have 300,000
_MAX_COUNT = 2**16  # of pairs, of tensors
_MAX_DIMS = 4
_MAX_COLUMNS = 2**20  # a row is the least that is held in memory
_READ_AHEAD = 2**20
_ALIGNMENT = "general.alignment"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SLICE = re.compile(r"(?P<stem>.+\.gguf)[.-]part[-_]?(?P<number>\d+)(?:[-_]?of[-_]?(?P<count>\d+))?")


class _Bytes:
    """The bytes of one file, or of the slices of one."""

    def __init__(self, name: str, files: list[BinaryIO]) -> None:
        self.name = name
        self._files = files
        self._starts: list[int] = []
        self.size = 0
        for file in files:
            self._starts.append(self.size)
            self.size += os.fstat(file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Exactly these bytes. Raises: ModelError if the file has become shorter."""
        parts = []
        while count:
            i = bisect_right(self._starts, offset) - 1
            here = self._starts[i + 1] - offset if i + 1 < len(self._starts) else count
            part = os.pread(self._files[i].fileno(), min(count, here), offset - self._starts[i])
            if not part:
                raise ModelError(f"{self.name}: ends at byte {offset}")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor that lies whole within its file."""

    name: str
    shape: tuple[int, ...]  # as in torch: what changes fastest comes last
    kind: GGMLQuantizationType
    source: _Bytes
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_bytes

    def rows(self, max_bytes: int, multiple: int = 1) -> Iterator[Floats]:
        """The values, as pieces of whole rows, about max_bytes each; all but the last of a multiple of rows.

        Raises: ModelError for a value that is no number: no model has one.
        """
        if len(self.shape) == 1:
            yield self._values(0, 1)[0]
            return
        num_rows, step = self.shape[0], multiple * max(1, max_bytes // (4 * self.shape[1] * multiple))
        for start in range(0, num_rows, step):
            yield self._values(start, min(step, num_rows - start))

    def raw_rows(self, max_bytes: int) -> Iterator[Bytes]:
        """The bytes of whole rows, about max_bytes each: [rows, bytes of a row]."""
        num_rows, step = math.prod(self.shape[:-1]), max(1, max_bytes // self._row_bytes)
        for start in range(0, num_rows, step):
            yield self._raw(start, min(step, num_rows - start))

    def _raw(self, start: int, count: int) -> Bytes:
        raw = self.source.read(self.offset + start * self._row_bytes, count * self._row_bytes)
        return np.frombuffer(raw, np.uint8).reshape(count, -1)

    def _values(self, start: int, count: int) -> Floats:
        values: Floats = quants.dequantize(self._raw(start, count), self.kind)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.source.name}: tensor {self.name}: holds a value that is no number")
        return values


class Gguf:
    """An open GGUF model with all its parts."""

    def __init__(self, path: Path) -> None:
        """Raises: ModelError for anything that is not one whole GGUF model; OSError."""
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.name = path.name
        with ExitStack() as opened:
            sources = _sources(path, opened)
            for i, source in enumerate(sources):
                self._add(source, i)
            self._check_whole(len(sources))
            self._opened = opened.pop_all()

    def __enter__(self) -> "Gguf":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _add(self, source: _Bytes, number: int) -> None:
        metadata, tensors = _read_header(source)
        expected = number, self.metadata.get("split.count", metadata.get("split.count"))
        if (metadata.get("split.no", number), metadata.get("split.count")) != expected:
            raise ModelError(f"{source.name}: not part {number} of this model by its split.no and split.count")
        self.metadata = metadata | self.metadata  # the first part's counts
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise ModelError(f"{source.name}: tensor {tensor.name}: there twice")
            self.tensors[tensor.name] = tensor

    def _check_whole(self, num_files: int) -> None:
        expected = self.metadata.get("split.count") or 1
        if expected != num_files:
            where = "" if num_files > 1 else "; the others are found by names such as x-00001-of-00004.gguf"
            raise ModelError(f"{self.name}: split.count = {expected!r}, and {num_files} files{where}")
        count = self.metadata.get("split.tensors.count", len(self.tensors))
        if count != len(self.tensors):
            raise ModelError(f"{self.name}: {len(self.tensors)} tensors in all; split.tensors.count = {count!r}")


def _sources(path: Path, opened: ExitStack) -> list[_Bytes]:
    """Opened: the files that make up the model, in order."""
    split, cut = _SPLIT.fullmatch(path.name), _SLICE.fullmatch(path.name)
    if split:
        count = int(split["count"])
        names = [f"{split['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
        return [_Bytes(name, [_open(path.with_name(name), opened)]) for name in names]
    if cut:
        return [_Bytes(cut["stem"], [_open(slice_, opened) for slice_ in _slices(path, cut)])]
    return [_Bytes(path.name, [_open(path, opened)])]


def _slices(path: Path, cut: re.Match[str]) -> list[Path]:
    """Every slice of a file that one of them belongs to. Raises: ModelError if one is missing in between."""
    found: dict[int, Path] = {}
    for file in path.parent.iterdir():
        other = _SLICE.fullmatch(file.name)
        if other and other["stem"] == cut["stem"] and other["count"] == cut["count"]:
            found[int(other["number"])] = file
    first = min(found, default=0)
    count = int(cut["count"] or len(found))
    missing = [i for i in range(first, first + min(count, _MAX_COUNT)) if i not in found]
    if first > 1 or missing or count != len(found):
        raise ModelError(f"{cut['stem']}: {len(found)} slices; expected all from number 0 or 1 on, none left out")
    return [found[i] for i in sorted(found)]


def _open(path: Path, opened: ExitStack) -> BinaryIO:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    return opened.enter_context(path.open("rb"))


class _Header:
    """Reads a header from its beginning; every read is checked against the file's end and a limit."""

    def __init__(self, source: _Bytes) -> None:
        self._source = source
        self._end = min(source.size, _MAX_HEADER_BYTES)
        self._block = b""
        self._block_at = 0
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self._end - self.position:
            limit = "the file" if self._end == self._source.size else f"a header of {_MAX_HEADER_BYTES} bytes"
            raise self.error(f"{what} at byte {self.position}: {count} bytes are more than is left of {limit}")
        start = self.position - self._block_at
        if start + count > len(self._block):
            ahead = min(max(count, _READ_AHEAD), self._end - self.position)
            self._block, self._block_at, start = self._source.read(self.position, ahead), self.position, 0
        self.position += count
        return self._block[start : start + count]

    def integer(self, form: str, what: str) -> int:
        return int(struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.integer("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what}: {raw[:40]!r} is not UTF-8") from None

    def value(self, key: str) -> Value:
        kind = self.integer("I", key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str) -> Value:
        kind, count = self.integer("I", key), self.integer("Q", key)
        if count > _MAX_ITEMS:
            raise self.error(f"{key}: an array of {count}; at most {_MAX_ITEMS} are accepted")
        if kind == _STRING:
            return [self.string(key) for _ in range(count)]
        return self._scalars(kind, count, key)

    def _scalars(self, kind: int, count: int, key: str) -> list[int] | list[float]:
        if kind not in _SCALARS:
            raise self.error(f"{key}: values of type {kind} are not known")
        form = _SCALARS[kind]
        raw = np.frombuffer(self.take(count * struct.calcsize("<" + form), key), np.dtype("<" + form))
        if kind == _FLOAT32 and count == 1:  # as it was meant: 1e-05, not 9.999999747378752e-06
            return [float(str(raw[0]))]
        values: list[int] | list[float] = raw.tolist()
        return values

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self._source.name}: {problem}")


def _read_header(source: _Bytes) -> tuple[dict[str, Value], list[GgufTensor]]:
    header = _Header(source)
    if header.take(len(_MAGIC), "magic") != _MAGIC:
        raise header.error("not a GGUF file")
    version = header.integer("I", "version")
    if version not in _VERSIONS:
        big = version and not version & 0xFFFF
        raise header.error("big-endian" if big else f"GGUF version {version}; supported: 2, 3")
    num_tensors, num_pairs = header.integer("Q", "tensor count"), header.integer("Q", "pair count")
    if max(num_tensors, num_pairs) > _MAX_COUNT:
        raise header.error(f"{num_tensors} tensors and {num_pairs} pairs; at most {_MAX_COUNT} are accepted")
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = header.string("a key")
        if key in metadata:
            raise header.error(f"{key}: there twice")
        metadata[key] = header.value(key)
    described = [_read_tensor(header, source) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment not in (2**i for i in range(3, 21)):
        raise header.error(f"{_ALIGNMENT} = {alignment!r}: expected a power of two")
    start = -(-header.position // alignment) * alignment
    tensors = [GgufTensor(t.name, t.shape, t.kind, source, start + t.offset) for t in described]
    _check_places(header, tensors, source.size)
    return metadata, tensors


def _read_tensor(header: _Header, source: _Bytes) -> GgufTensor:
    """One description; its offset counts from where the data begin."""
    name = header.string("a tensor's name")
    num_dims = header.integer("I", name)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise header.error(f"tensor {name}: {num_dims} dimensions; from 1 to {_MAX_DIMS} are accepted")
    shape = tuple(header.integer("Q", name) for _ in range(num_dims))[::-1]
    kind = _kind(header, name, header.integer("I", name))
    block, _ = GGML_QUANT_SIZES[kind]
    if shape[-1] > _MAX_COLUMNS:
        raise header.error(f"tensor {name}: rows of {shape[-1]}; at most {_MAX_COLUMNS} are accepted")
    if not all(shape) or shape[-1] % block:
        raise header.error(f"tensor {name}: shape {list(shape)} is not of whole {kind.name} blocks of {block}")
    return GgufTensor(name, shape, kind, source, header.integer("Q", name))


def _kind(header: _Header, name: str, number: int) -> GGMLQuantizationType:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise header.error(f"tensor {name}: type {number} is not known") from None
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        raise header.error(f"tensor {name}: type {kind.name} is not supported") from None
    return kind


def _check_places(header: _Header, tensors: list[GgufTensor], size: int) -> None:
    """Raises: ModelError for a tensor beyond the file, or two in one place, by which a small file could name much."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise header.error(f"tensor {tensor.name}: lies over another")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise header.error(f"tensor {tensor.name}: ends at byte {end} of a file of {size}: truncated or corrupt")
