"""Which tensor of a GGUF file becomes which of a Hugging Face checkpoint, and how its values change on the way."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_architectures import Architecture
from kvrelay.engine.gguf_file import Floats, Gguf, GgufTensor
from kvrelay.engine.gguf_rope import FACTORS
from kvrelay.engine.gguf_safetensors import TensorPlan

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_PERMUTED = ("attn_q", "attn_k")


def plan_tensors(gguf: Gguf, architecture: Architecture, config: Mapping[str, Any]) -> list[TensorPlan]:
    """Every tensor of the file but those that config.json holds.

    Raises: ModelError for one that the architecture does not know; that would be part of another model.
    """
    plans, unknown = [], []
    for tensor in gguf.tensors.values():
        if tensor.name in FACTORS:
            continue
        name = _hf_name(tensor, architecture, config["num_hidden_layers"])
        if name is None:
            unknown.append(tensor.name)
            continue
        part = tensor.name.split(".")[-2]
        if architecture.permuted and part in _PERMUTED:
            head_dim = config["head_dim"]
            if tensor.shape[0] % head_dim or head_dim % 2:
                raise ModelError(f"{gguf.name}: {tensor.name} has {tensor.shape[0]} rows; heads have {head_dim}")
            plans.append(TensorPlan(name=name, tensor=tensor, change=_reorder(head_dim), row_multiple=head_dim))
        elif architecture.norm_offset and part.endswith("_norm"):
            plans.append(TensorPlan(name=name, tensor=tensor, change=_subtract(architecture.norm_offset)))
        else:
            plans.append(TensorPlan(name=name, tensor=tensor))
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise ModelError(f"{gguf.name}: {architecture.hf} has no use for: {shown}")
    return plans


def _hf_name(tensor: GgufTensor, architecture: Architecture, num_layers: int) -> str | None:
    match = _NAME.fullmatch(tensor.name)
    if match is None or len(tensor.shape) > 2:
        return None
    if match["layer"] is None:
        name = _TOP_NAMES.get(match["part"])
        return name and f"{name}.{match['kind']}"
    name, layer = architecture.names.get(match["part"]), int(match["layer"])
    return f"model.layers.{layer}.{name}.{match['kind']}" if name and layer < num_layers else None


def _reorder(head_dim: int) -> Callable[[Floats], Floats]:
    """Rows of each head: from pairs (2i, 2i + 1) that are turned together, to (i, i + head_dim / 2)."""

    def reorder(rows: Floats) -> Floats:
        pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return reorder


def _subtract(offset: float) -> Callable[[Floats], Floats]:
    return lambda values: values - offset
