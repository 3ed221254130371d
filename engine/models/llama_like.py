"""What config.json says of a decoder that is like Llama: the part that families share, and that each adds to."""

from collections.abc import Callable
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.hf_config import ConfigReader
from kvrelay.engine.models.options import DecoderConfig, LayerConfig, NormConfig, RopeConfig, TensorNames
from kvrelay.engine.models.rope_config import read_rope

_MOST_LAYERS = 10_000


def llama_like(reader: ConfigReader, *, layers: tuple[LayerConfig, ...] = (), **options: Any) -> DecoderConfig:
    """Llama with these options of DecoderConfig beside, or instead of, its own."""
    num_heads = reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} attention heads do not divide among {num_kv_heads} key-value heads")
    head_dim = read_head_dim(reader)
    own: dict[str, Any] = {"scale": head_dim**-0.5}
    if "norm" not in options:
        own["norm"] = rms_norm(reader)
    if "activation" not in options:
        own["activation"] = reader.activation("hidden_act")
    return DecoderConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        intermediate_size=reader.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers or read_layers(reader),
        tie_embeddings=reader.flag("tie_word_embeddings"),
        **own | options,
    )


def read_head_dim(reader: ConfigReader) -> int:
    return reader.size("head_dim", reader.size("hidden_size") // reader.size("num_attention_heads"))


def read_num_layers(reader: ConfigReader) -> int:
    return reader.size("num_hidden_layers", most=_MOST_LAYERS)


def read_layers(
    reader: ConfigReader,
    *,
    window: int = 0,
    slides: Callable[[int], bool] = lambda i: True,
    turns: Callable[[int, bool], bool] = lambda i, slides: True,
    ropes: tuple[RopeConfig, RopeConfig] | None = None,
    partial_rotary: bool = False,
) -> tuple[LayerConfig, ...]:
    """Window and rope of each layer.

    window: 0: none slides. slides: whether layer i has the window, where `layer_types` does not say. turns: whether
    layer i, which slides or not, has a position embedding. ropes: of layers without a window and with it; by default
    one for all, which may be partial.
    """
    num_layers = read_num_layers(reader)
    kinds = reader.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if window and slides(i) else "full_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention") if window else ("full_attention",)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise reader.error("layer_types", f"expected {num_layers} of {', '.join(known)}")
    if ropes is None:
        ropes = (read_rope(reader, read_head_dim(reader), partial=partial_rotary),) * 2
    layers = []
    for i, kind in enumerate(kinds):
        sliding = kind == "sliding_attention"
        rope = ropes[sliding] if turns(i, sliding) else None
        layers.append(LayerConfig(window=window if sliding else 0, rope=rope))
    return tuple(layers)


def read_optional_window(reader: ConfigReader) -> int:
    """A window that is often there, and without effect, where it is not used."""
    window = reader.size_or_none("sliding_window")
    return window if reader.flag("use_sliding_window") else 0


def attention_biases(reader: ConfigReader) -> dict[str, Any]:
    """Of all four matrices, as Llama has them."""
    bias = reader.flag("attention_bias")
    return {"qkv_bias": bias, "attention_output_bias": bias}


def ungated(reader: ConfigReader, up: str, down: str) -> dict[str, Any]:
    """An MLP of two matrices."""
    names = TensorNames(mlp_inputs=(up,), mlp_output=down)
    return {"names": names, "gated": False, "activation": reader.activation("hidden_act")}


def rms_norm(reader: ConfigReader, *, weight_offset: float = 0.0) -> NormConfig:
    return NormConfig(kind="rms", eps=reader.number("rms_norm_eps"), weight_offset=weight_offset)


def layer_norm(reader: ConfigReader, eps: str, *, weight_offset: float = 0.0) -> NormConfig:
    """`eps`: the setting's name."""
    return NormConfig(kind="layer", eps=reader.number(eps), bias=True, weight_offset=weight_offset)
