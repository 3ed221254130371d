"""Rotary position embedding: from a GGUF file's keys and tensors to config.json's rope_parameters.

Llama 3's scaling and Phi-3's stand in a file as what each frequency is divided by.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import GgufTensor
from kvrelay.engine.gguf_settings import Settings

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(
    settings: Settings, tensors: Mapping[str, GgufTensor], head_dim: int, *, theta: float = 10_000.0
) -> dict[str, Any]:
    """theta: where the file has none. Raises: ModelError for a scaling that is not known."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base", theta)}
    rotary_dim = settings.size("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = rotary_dim / head_dim
    return found | _scaling(settings, tensors, rotary_dim, found["rope_theta"])


def _scaling(settings: Settings, tensors: Mapping[str, GgufTensor], rotary_dim: int, theta: float) -> dict[str, Any]:
    kind = settings.get("rope.scaling.type", "none")
    if FREQUENCIES in tensors:
        settings.expect("rope.scaling.type", "none", "linear", "llama3")
        settings.expect("rope.scaling.factor", 1.0, 0.0)
        factors = _factors(settings, tensors[FREQUENCIES], rotary_dim)
        if max(factors) == min(factors) == 1:
            return {}
        return _llama3(factors, theta, rotary_dim) or _longrope(settings, factors, factors, original=0)
    if LONG in tensors and SHORT in tensors:
        long, short = (_factors(settings, tensors[name], rotary_dim) for name in (LONG, SHORT))
        settings.expect("rope.scaling.type", "longrope", "none")
        return _longrope(settings, long, short, original=settings.size("rope.scaling.original_context_length"))
    factor = settings.number_or_none("rope.scaling.factor") or settings.number_or_none("rope.scale_linear") or 1.0
    if kind == "yarn":
        return _yarn(settings, factor)
    settings.get("rope.scaling.original_context_length")  # says nothing without a scaling
    if kind not in ("none", "linear"):
        raise settings.error("rope.scaling.type", "not supported, or the tensors that go with it are missing")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _factors(settings: Settings, tensor: GgufTensor, rotary_dim: int) -> list[float]:
    if tensor.shape != (rotary_dim // 2,):
        raise ModelError(f"{tensor.source.name}: {tensor.name} has shape {list(tensor.shape)}, not [{rotary_dim // 2}]")
    factors: list[float] = next(tensor.rows(2**20)).tolist()
    if min(factors) <= 0:
        raise ModelError(f"{tensor.source.name}: {tensor.name}: expected positive numbers")
    return factors


def _llama3(factors: list[float], theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """The parameters of every Llama 3, but for the factor, if these are what they come to."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = (_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    factor = max(factors)
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if not np.allclose(factors, expected, rtol=1e-5):
        return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _longrope(settings: Settings, long: list[float], short: list[float], *, original: int) -> dict[str, Any]:
    """original: the context from which on the long factors count; 0: the model's own, they are equal."""
    magnitude = settings.number("rope.scaling.attn_factor", 1.0)
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original or settings.size("context_length"),
        "attention_factor": magnitude,
    }


def _yarn(settings: Settings, factor: float) -> dict[str, Any]:
    settings.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": settings.size("rope.scaling.original_context_length"),
        "attention_factor": settings.number_or_none("rope.scaling.yarn_attn_factor"),
        "beta_fast": settings.number_or_none("rope.scaling.yarn_beta_fast"),
        "beta_slow": settings.number_or_none("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in found.items() if value is not None}
