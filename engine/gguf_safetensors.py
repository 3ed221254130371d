"""GGUF tensors into safetensors files, one piece of one tensor at a time: memory does not grow with the model.

F32, F16 and BF16 stay as they are; everything quantised becomes bfloat16, whose error is far below the quantisation's.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from tqdm import tqdm

from kvrelay.engine.gguf_file import Floats, GgufTensor

PIECE_BYTES = 2**24  # as float32; dequantising takes a few times as much
MAX_FILE_BYTES = 5 * 10**9
_STORED = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What becomes of one GGUF tensor: another name, and what is done to its values, row by row."""

    name: str
    tensor: GgufTensor
    change: Callable[[Floats], Floats] | None = None
    row_multiple: int = 1  # rows that `change` needs together

    @property
    def dtype(self) -> str:
        return _STORED.get(self.tensor.kind, "BF16")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * _ITEM_BYTES[self.dtype]

    def pieces(self) -> Iterator[bytes]:
        for values in self.tensor.rows(PIECE_BYTES, self.row_multiple):
            yield _ENCODE[self.dtype](values if self.change is None else self.change(values))


def dtype_of(tensors: Sequence[GgufTensor]) -> str:
    """The dtype that a checkpoint of these is said to have: its matrices', if they agree."""
    stored = {_STORED.get(tensor.kind, "BF16") for tensor in tensors if len(tensor.shape) > 1}
    return _DTYPE_NAMES[stored.pop()] if len(stored) == 1 else "bfloat16"


def write_safetensors(folder: Path, plans: Sequence[TensorPlan], *, progress: bool) -> None:
    """Write model.safetensors, or numbered files with their index where one would grow beyond MAX_FILE_BYTES.

    Raises: ModelError for values that are no numbers; OSError.
    """
    shards = _shards(plans)
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    total = sum(plan.num_bytes for plan in plans)
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=not progress) as bar:
        for name, shard in zip(names, shards, strict=True):
            _write_file(folder / name, shard, bar.update)
    if count > 1:
        places = {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(plans: Sequence[TensorPlan]) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.num_bytes > MAX_FILE_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.num_bytes
    return shards


def _write_file(path: Path, plans: Sequence[TensorPlan], written: Callable[[int], object]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    plans = sorted(plans, key=lambda plan: -_ITEM_BYTES[plan.dtype])  # wide ones first: all of them lie aligned
    for plan in plans:
        start, end = end, end + plan.num_bytes
        header[plan.name] = {"dtype": plan.dtype, "shape": plan.tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            for piece in plan.pieces():
                file.write(piece)
                written(len(piece))


def _float32(values: Floats) -> bytes:
    return values.tobytes()


def _float16(values: Floats) -> bytes:
    return values.astype(np.float16).tobytes()


def _bfloat16(values: Floats) -> bytes:
    """Rounded to the nearest, ties to even. The values are numbers."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_ENCODE: dict[str, Callable[[Floats], bytes]] = {"F32": _float32, "F16": _float16, "BF16": _bfloat16}
