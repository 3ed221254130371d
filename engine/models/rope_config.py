"""What config.json says of rotary position embedding, under its old names (rope_theta, rope_scaling with `type`, `su`)
and its new one (rope_parameters with `rope_type`).

Frequencies are fixed when the model is loaded: a key's rotation may depend on its own position and on nothing else,
since keys are computed in chunks, kept and shared between requests of any length. Two kinds of scaling are defined
otherwise, by the length of the text so far, and this is what becomes of them:

- dynamic: unscaled up to max_position_embeddings, which is what transformers computes there, and no request is longer.
- longrope: the long factors, for every request, where the model's context is longer than its original one.
"""

import math
from collections.abc import Callable
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import shown
from kvrelay.engine.models.hf_config import ConfigReader
from kvrelay.engine.models.options import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

_THETA = 10_000.0


def read_rope(reader: ConfigReader, head_dim: int, *, partial: bool) -> RopeConfig:
    """The one that all layers share. `partial`: it may turn a part of each head only."""
    settings = {**reader.object("rope_scaling"), **reader.object("rope_parameters")}
    settings.setdefault("rope_theta", reader.get("rope_theta", _THETA))
    return _rope(reader, settings, head_dim, "rope_parameters", partial=partial)


def read_ropes_by_kind(reader: ConfigReader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers with full attention, and of those with a sliding window, which old configs never scale."""
    theta = reader.get("rope_theta", _THETA)
    sliding_theta = reader.get("rope_local_base_freq", theta)
    kinds = ConfigReader(reader.object("rope_parameters"), "config.json: rope_parameters: ")
    full = {"rope_theta": theta, **reader.object("rope_scaling"), **kinds.object("full_attention")}
    sliding = {"rope_theta": sliding_theta, **kinds.object("sliding_attention")}
    kinds.refuse_unread()
    return (
        _rope(reader, full, head_dim, "rope_parameters.full_attention"),
        _rope(reader, sliding, head_dim, "rope_parameters.sliding_attention"),
    )


def _rope(
    top: ConfigReader, settings: dict[str, Any], head_dim: int, where: str, *, partial: bool = False
) -> RopeConfig:
    reader = ConfigReader(settings, f"config.json: {where}: ")
    theta = reader.number("rope_theta")
    if theta <= 1:
        raise reader.error("rope_theta", "expected more than 1")
    kind = reader.get("type", "default")  # the old name; where both stand, the new one counts
    kind = reader.get("rope_type", kind)
    share = 1.0
    if partial:
        share = reader.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    else:
        top.expect("partial_rotary_factor", 1.0)
        reader.expect("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelError(
            f"config.json: head_dim = {head_dim}, partial_rotary_factor = {share}: rotary embedding turns an even "
            f"number of elements, at most the head's"
        )
    context = top.size("max_position_embeddings")
    original = top.get("original_max_position_embeddings", reader.get("original_max_position_embeddings", context))
    if not isinstance(original, int) or original < 2:
        raise top.error("original_max_position_embeddings", "expected an integer, at least 2")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ModelError(
            f"config.json: {where}: rope type {shown(kind)} is not supported; supported: {', '.join(_SCALINGS)}"
        )
    scaling, magnitude = _SCALINGS[kind](reader, rotary_dim // 2, original, context)
    reader.refuse_unread()
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling, magnitude=magnitude)


# Each: settings, number of pairs that turn, original context and context -> scaling and magnitude.


def _default(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[None, float]:
    return None, 1.0


def _linear(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[LinearScaling, float]:
    return LinearScaling(factor=reader.number("factor")), 1.0


def _dynamic(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[None, float]:
    reader.number("factor")  # counts beyond the context only
    if original != context:
        raise reader.error("original_max_position_embeddings", "with rope type 'dynamic': not supported")
    return None, 1.0


def _llama3(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[Llama3Scaling, float]:
    scaling = Llama3Scaling(
        factor=reader.number("factor"),
        low_freq_factor=reader.number("low_freq_factor"),
        high_freq_factor=reader.number("high_freq_factor"),
        original_context=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise reader.error("high_freq_factor", "expected more than low_freq_factor")
    return scaling, 1.0


def _yarn(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[YarnScaling, float]:
    reader.assume(truncate=True)
    scaling = YarnScaling(
        factor=reader.number("factor", context / original),
        original_context=original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=reader.flag("truncate"),
    )
    magnitude = _yarn_magnitude(scaling.factor, 1.0)
    if reader.get("mscale") and reader.get("mscale_all_dim"):
        magnitude = _yarn_magnitude(scaling.factor, reader.number("mscale"))
        magnitude /= _yarn_magnitude(scaling.factor, reader.number("mscale_all_dim"))
    return scaling, reader.number("attention_factor", magnitude)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(reader: ConfigReader, num_pairs: int, original: int, context: int) -> tuple[LongRopeScaling, float]:
    short, long = (reader.numbers(name, num_pairs) for name in ("short_factor", "long_factor"))
    factor = reader.number("factor", context / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaling = LongRopeScaling(divisors=long if context > original else short)
    return scaling, reader.number("attention_factor", magnitude)


_SCALINGS: dict[str, Callable[[ConfigReader, int, int, int], tuple[Scaling | None, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
