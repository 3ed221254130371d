"""A checkpoint's tensors, from safetensors files: mapped, checked, each taken once, none left over.

Files are mapped, so that loading costs no copy where the dtype is already right, and two nodes on one machine share
the pages. A mapped file must not change while a node runs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.engine.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class Checkpoint:
    """The tensors of a model folder, handed out by name."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open every file and read its header. Raises: ModelError."""
        self._path = path
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, Any] = {}
        listed = _listed_files(path)
        for name in sorted(set(listed.values())) if listed else [_SINGLE]:
            file = _open(path / name)
            for tensor in file.keys():  # noqa: SIM118 - not a dict
                if tensor in self._file_of:
                    raise ModelError(f"{path / name}: {tensor} is in another file too")
                self._file_of[tensor] = file
        for tensor, name in listed.items():
            if tensor not in self._file_of:
                raise ModelError(f"{path / name}: {tensor} is missing, though {_INDEX} lists it")

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype asked for. Its shape is checked before memory is taken. Each can be taken once.

        Raises: ModelError.
        """
        file = self._file_of.pop(name, None)
        if file is None:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        header = file.get_slice(name)
        found = tuple(header.get_shape())
        if found != shape:
            raise ModelError(f"{self._path}: tensor {name} has shape {list(found)}; config.json asks for {list(shape)}")
        if header.get_dtype() not in _DTYPES:
            raise ModelError(f"{self._path}: tensor {name} is {header.get_dtype()}; supported: {', '.join(_DTYPES)}")
        tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._device, self._dtype)

    def finish(self, may_remain: Callable[[str], bool]) -> None:
        """Raises: ModelError if a tensor was not taken and may not remain: the model is another than the one built."""
        unused = sorted(name for name in self._file_of if not may_remain(name))
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise ModelError(f"{self._path}: tensors that this architecture does not use: {shown}")
        self._file_of.clear()


def _listed_files(path: Path) -> dict[str, str]:
    """File of each tensor by the index of a sharded checkpoint; empty where there is one file alone."""
    if (path / _SINGLE).is_file():
        return {}
    index = path / _INDEX
    if not index.is_file():
        raise ModelError(f"{path}: no {_SINGLE} and no {_INDEX}")
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not an index of tensors: {error!r}") from error
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{index}: weight_map lists no tensors")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not the name of a file in this folder")
    return listed


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read, perhaps truncated: {error}") from error
