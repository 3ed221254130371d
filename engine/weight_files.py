"""Which tensors a checkpoint's safetensors files hold, and where: read by hand from their headers, without torch.

A file is 8 bytes (the header's length), a JSON header, and the tensors' bytes, end to end. Everything a header says is
checked against the file before anybody relies on it or takes memory for it: each tensor lies inside the file, has the
bytes that its dtype and shape take, and shares none with another. Other formats are not read; pickled ones, which run
code when they are loaded, are refused by name.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import check_regular, parse_object, read_file, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MAX_HEADER_BYTES = 16 * 2**20  # over a hundred thousand tensors; parsed it takes some twenty times its size
_MAX_INDEX_BYTES = 32 * 2**20
_MAX_NAME = 512
_MAX_DIMENSIONS = 16
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file."""

    file: Path
    dtype: str  # one of DTYPE_BITS
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder by name, the files one after the other, each in the order of its bytes.

    Raises: ModelError, with the file and what is wrong with it.
    """
    listed = _listed_files(folder)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(listed.values())) if listed else [SINGLE]:
        file = folder / name
        for tensor, stored in read_header(file).items():
            if tensor in found:
                raise ModelError(f"{file}: {tensor} is in {found[tensor].file.name} too")
            found[tensor] = stored
    for tensor, name in listed.items():
        if tensor not in found or found[tensor].file.name != name:
            raise ModelError(f"{folder / name}: {shown(tensor)} is missing, though {INDEX} lists it")
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, in the order of their bytes. Raises: ModelError."""
    header, data_start, file_size = _read_json_header(file)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{file}: {_METADATA} = {shown(metadata)}: expected an object of strings")
    found = {name: _stored(file, name, entry, data_start) for name, entry in header.items()}
    ordered = sorted(found.items(), key=lambda item: (item[1].offset, item[1].size_bytes))
    end = data_start
    for name, stored in ordered:
        if stored.offset != end:
            wrong = "overlap" if stored.offset < end else "leave a gap"
            raise ModelError(f"{file}: tensor {name}: data_offsets {wrong} with the tensor before")
        end += stored.size_bytes
    if end > file_size:
        raise ModelError(f"{file}: ends {end - file_size} bytes before its last tensor does: truncated")
    if end < file_size:
        raise ModelError(f"{file}: {file_size - end} bytes stand behind the last tensor")
    return dict(ordered)


def _read_json_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors' bytes begin, and the file's size."""
    try:
        check_regular(file, file.stat().st_mode)  # opening a pipe would wait for its other end
        with file.open("rb") as content:
            file_size = os.fstat(content.fileno()).st_size
            length = int.from_bytes(content.read(_LENGTH_BYTES), "little")
            if _LENGTH_BYTES + length > file_size or file_size < _LENGTH_BYTES:
                raise ModelError(f"{file}: {file_size} bytes, too few for its header: truncated, or not safetensors")
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{file}: header of {length} bytes; at most {_MAX_HEADER_BYTES} are supported")
            header = content.read(length)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    if not header.startswith(b"{"):  # so it is UTF-8 as well
        raise ModelError(f"{file}: its header is not JSON: not safetensors")
    return parse_object(header, f"{file}: header", unique=True), _LENGTH_BYTES + length, file_size


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise ModelError(f"{file}: {shown(name)} is no name of a tensor")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{file}: tensor {name} = {shown(entry)}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelError(f"{file}: tensor {name}: dtype {shown(dtype)} is not known")
    if not _are_counts(shape):
        raise ModelError(f"{file}: tensor {name}: shape {shown(shape)}: expected integers from 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{file}: tensor {name}: data_offsets {shown(offsets)}: expected a begin and an end")
    begin, end = offsets
    stored = StoredTensor(file, dtype, tuple(shape), data_start + begin, end - begin)
    if stored.num_elements * DTYPE_BITS[dtype] != stored.size_bytes * 8:
        raise ModelError(f"{file}: tensor {name}: {end - begin} bytes are not what {dtype} {shown(shape)} takes")
    return stored


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _listed_files(folder: Path) -> dict[str, str]:
    """File of each tensor by the index of a sharded checkpoint; empty where there is one file alone."""
    if os.path.lexists(folder / SINGLE):
        return {}
    index = folder / INDEX
    content = read_file(index, _MAX_INDEX_BYTES)
    if content is None:
        raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}{_hint(folder)}")
    listed = parse_object(content, str(index), unique=True).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{index}: weight_map lists no tensors")
    for name in listed.values():
        if not isinstance(name, str) or not name.isprintable() or name in ("", "..") or Path(name).name != name:
            raise ModelError(f"{index}: {shown(name)} is not the name of a file in this folder")
    return listed


def _hint(folder: Path) -> str:
    """What to do about the weights that are there instead."""
    for file in _matching(folder, _PICKLED):
        return f"; {file.name} is not read: a pickled checkpoint can run code; convert it to safetensors"
    for file in _matching(folder, ("*.gguf",)):
        return f"; {file.name} is taken where the model names the file itself"
    return ""


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (file for pattern in patterns for file in sorted(folder.glob(pattern)))
