"""Loads a checkpoint into transformers' own modules, or says why it is not one that runs over a paged KV pool.

No code from the folder runs, no pickled file is read and nothing is asked of the network. Every tensor is accounted
for: one that is missing, of another shape or left over is an error, not a guess.
"""

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.fallback_attention import DRY_RUN, register
from kvrelay.engine.weight_files import read_tensors

# What transformers, and the modules it runs, raise over a file or a config that is not what they expect.
_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, ArithmeticError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
_MAX_ERROR = 300  # characters of what they say
# Their frequencies change with the longest position in the batch, so that a row would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Causal masks, which old checkpoints hold beside the weights. A bias of the attention belongs to a projection.
_STORED_MASK = re.compile(r".*\.attn\.(masked_)?bias")


@contextmanager
def translated(info: ModelInfo, doing: str) -> Iterator[None]:
    """Raises: ModelError, in one line, for whatever transformers raises within."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"architecture {info.architecture} is not supported: {error.message}") from error
    except _ERRORS as error:
        says = " ".join(str(error).split()) or type(error).__name__
        says = says if len(says) <= _MAX_ERROR else f"{says[:_MAX_ERROR]}..."
        raise ModelError(f"{info.path}: {info.architecture} {doing}: {says}") from error


def load_checkpoint(info: ModelInfo, dtype: torch.dtype, device: torch.device) -> Any:
    """The model as transformers builds it, in eval mode, ready for a dry run. Raises: ModelError."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # what it warns of is checked here
    disable_progress_bar()  # type: ignore[no-untyped-call]
    read_tensors(info.path)  # for its errors: transformers trusts a file's header
    with translated(info, "cannot be read"):
        config = AutoConfig.from_pretrained(info.path, local_files_only=True, trust_remote_code=False)
    model_class = _model_class(info, config)
    _refuse(info, config, model_class)
    register()
    with translated(info, "cannot be loaded"):
        model, found = model_class.from_pretrained(
            info.path,
            config=config,
            dtype=dtype,
            attn_implementation=DRY_RUN,
            experts_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported, with what is missing, and refused below
            output_loading_info=True,
        )
    _account_for_tensors(info, found)
    return model.to(device).requires_grad_(False)


def _model_class(info: ModelInfo, config: Any) -> Any:
    """The causal LM that the config names, which must be the one that transformers would choose."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if not inspect.isclass(model_class) or model_class.__name__ != info.architecture:
        offered = model_class.__name__ if inspect.isclass(model_class) else "none"
        raise ModelError(
            f"architecture {info.architecture} is not a causal language model that transformers knows "
            f"(for model_type {config.model_type!r} it has {offered})"
        )
    return model_class


def _refuse(info: ModelInfo, config: Any, model_class: Any) -> None:
    """Raises: ModelError for what can be seen before any weight is read."""

    def refuse(why: str) -> None:
        raise ModelError(f"architecture {info.architecture} is not supported: {why}")

    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        refuse("it attends to an encoder")
    if model_class._is_stateful:
        refuse("it keeps a state that is not the keys and values of attention")
    if not model_class._supports_attention_backend:
        refuse("transformers has no replaceable attention for it")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        refuse("it takes no position_ids")
    if getattr(config, "quantization_config", None) is not None:
        refuse("its weights are quantised")
    for kind in sorted(_rope_types(config)):
        if kind in _BATCH_DEPENDENT_ROPE:
            refuse(f"rope type {kind!r} depends on the other sequences of a batch")


def _rope_types(config: Any) -> set[str]:
    """Of all layers: `rope_parameters` has one set of settings, or one for each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    each = [value for value in settings.values() if isinstance(value, dict)] or [settings]
    return {str(one.get("rope_type", "default")) for one in each}


def _account_for_tensors(info: ModelInfo, found: dict[str, Any]) -> None:
    for kind, says in (
        ("missing_keys", "tensors are missing"),
        ("mismatched_keys", "tensors have another shape than config.json asks for"),
        ("unexpected_keys", "tensors that this architecture does not use"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in found[kind])
        names = [name for name in names if not _STORED_MASK.fullmatch(name)]
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(f"{info.path}: {says}: {shown}")
    if found["error_msgs"]:
        raise ModelError(f"{info.path}: {' '.join(str(found['error_msgs'][0]).split())}")


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that are matrix products, transposed ones included."""
    return [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def weight_and_bias(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight as [outputs, inputs]."""
    return (layer.weight if type(layer) is nn.Linear else layer.weight.t()), layer.bias
