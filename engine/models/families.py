"""Each architecture that the decoder computes, as what it has beyond Llama, read from its config.json.

A family is one short function from settings to options. What a config leaves out is assumed as transformers does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvrelay.engine.models.hf_config import ConfigReader
from kvrelay.engine.models.llama_like import (
    attention_biases,
    layer_norm,
    llama_like,
    read_head_dim,
    read_layers,
    read_num_layers,
    read_optional_window,
    rms_norm,
    ungated,
)
from kvrelay.engine.models.options import DecoderConfig, LayerConfig, NormConfig, TensorNames
from kvrelay.engine.models.rope_config import read_ropes_by_kind

_SANDWICH = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
_NORMS_AFTER = TensorNames(
    attention_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
_ONE_NORM = TensorNames(mlp_norm="")

# --- Llama and what differs from it by little --------------------------------------------------------------------


def _llama(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu")
    return llama_like(reader, mlp_bias=reader.flag("mlp_bias"), **attention_biases(reader))


def _mistral(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", sliding_window=4096)
    return llama_like(reader, layers=read_layers(reader, window=reader.size_or_none("sliding_window")))


def _qwen2(reader: ConfigReader) -> DecoderConfig:
    return llama_like(reader, layers=_upper_layers_slide(reader), qkv_bias=True)


def _qwen3(reader: ConfigReader) -> DecoderConfig:
    reader.assume(head_dim=128)
    return llama_like(reader, layers=_upper_layers_slide(reader), qk_norm=rms_norm(reader), **attention_biases(reader))


def _upper_layers_slide(reader: ConfigReader) -> tuple[LayerConfig, ...]:
    reader.assume(hidden_act="silu", sliding_window=4096, max_window_layers=28)
    first = reader.get("max_window_layers", 0)
    if not isinstance(first, int):
        raise reader.error("max_window_layers", "expected an integer")
    return read_layers(reader, window=read_optional_window(reader), slides=lambda i: i >= first)


def _smollm3(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", tie_word_embeddings=True, rope_theta=2_000_000.0)
    num_layers, interval = read_num_layers(reader), reader.size("no_rope_layer_interval", 4)
    roped = reader.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])  # as it is named
    if not isinstance(roped, list) or len(roped) != num_layers or any(value not in (0, 1) for value in roped):
        raise reader.error("no_rope_layers", f"expected {num_layers} zeros and ones")
    layers = read_layers(
        reader,
        window=read_optional_window(reader),
        slides=lambda i: not roped[i],
        turns=lambda i, slides: bool(roped[i]),
    )
    return llama_like(reader, layers=layers, mlp_bias=reader.flag("mlp_bias"), **attention_biases(reader))


def _cwm(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", head_dim=128, sliding_window=8192, rope_theta=1_000_000.0)
    window = reader.size_or_none("sliding_window")
    return llama_like(reader, layers=read_layers(reader, window=window, slides=lambda i: i % 4 != 0))


def _arcee(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="relu2")
    mlp = ungated(reader, "up_proj", "down_proj")
    return llama_like(reader, mlp_bias=reader.flag("mlp_bias"), **mlp, **attention_biases(reader))


def _seed_oss(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", head_dim=128, attention_bias=True)
    return llama_like(
        reader,
        qkv_bias=reader.flag("attention_bias"),
        attention_output_bias=reader.flag("attention_out_bias"),
        mlp_bias=reader.flag("mlp_bias"),
    )


def _granite(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", attention_multiplier=1.0)
    return llama_like(reader, logit_scale=1 / reader.number("logits_scaling", 1.0), **_multipliers(reader))


def _hyperclovax(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", use_post_norm=True)
    names = TensorNames()
    if reader.flag("use_post_norm"):
        names = TensorNames(attention_output_norm="post_norm1", mlp_output_norm="post_norm2")
    logit_scale = reader.number("logits_scaling", 1.0)
    return llama_like(reader, names=names, logit_scale=logit_scale, **_multipliers(reader))


def _multipliers(reader: ConfigReader) -> dict[str, Any]:
    return {
        "scale": reader.number("attention_multiplier", read_head_dim(reader) ** -0.5),
        "embedding_scale": reader.number("embedding_multiplier", 1.0),
        "residual_scale": reader.number("residual_multiplier", 1.0),
        "mlp_bias": reader.flag("mlp_bias"),
        **attention_biases(reader),
    }


# --- Gemma -------------------------------------------------------------------------------------------------------


def _gemma(reader: ConfigReader) -> DecoderConfig:
    for name in ("hidden_act", "hidden_activation"):  # "gelu" meant the one by tanh in the first configs
        reader.expect(name, "gelu_pytorch_tanh", "gelu")
    return llama_like(reader, activation="gelu_tanh", **_gemma_parts(reader))


def _gemma2(reader: ConfigReader) -> DecoderConfig:
    return _later_gemma(reader, layers=_every_other_slides(reader), names=_SANDWICH, **_softcaps(reader))


def _vaultgemma(reader: ConfigReader) -> DecoderConfig:
    names = TensorNames(mlp_norm="pre_feedforward_layernorm")
    return _later_gemma(reader, layers=_every_other_slides(reader), names=names, **_softcaps(reader))


def _every_other_slides(reader: ConfigReader) -> tuple[LayerConfig, ...]:
    reader.assume(sliding_window=4096, head_dim=256)
    return read_layers(reader, window=reader.size_or_none("sliding_window"), slides=lambda i: i % 2 == 0)


def _softcaps(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    return {
        "attention_softcap": reader.number_or_none("attn_logit_softcapping"),
        "logit_softcap": reader.number_or_none("final_logit_softcapping"),
    }


def _gemma3(reader: ConfigReader) -> DecoderConfig:
    reader.assume(
        sliding_window=4096,
        head_dim=256,
        sliding_window_pattern=6,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
    )
    pattern, window = reader.size("sliding_window_pattern"), reader.size_or_none("sliding_window")
    ropes = read_ropes_by_kind(reader, read_head_dim(reader))
    return _later_gemma(
        reader,
        layers=read_layers(reader, window=window, slides=lambda i: (i + 1) % pattern != 0, ropes=ropes),
        names=_SANDWICH,
        qk_norm=rms_norm(reader, weight_offset=1.0),
        logit_softcap=reader.number_or_none("final_logit_softcapping"),
    )


def _gemma3_with_images(reader: ConfigReader) -> DecoderConfig:
    """Its text part alone: images are for those who can send some."""
    for name in ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"):
        reader.get(name)
    reader.expect("tie_word_embeddings", True)
    text = ConfigReader(reader.object("text_config"), "config.json: text_config: ")
    text.assume(  # published configs leave it out
        vocab_size=262_208,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-6,
    )
    config = _gemma3(text)
    text.refuse_unread()
    parts = ("vision_tower.", "multi_modal_projector.")
    names = replace(
        config.names,
        trunks=("language_model.model", "model.language_model"),
        other_parts=(*parts, *(f"model.{part}" for part in parts)),
    )
    return replace(config, names=names)


def _later_gemma(reader: ConfigReader, **options: Any) -> DecoderConfig:
    reader.assume(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256)
    reader.get("hidden_act")  # a duplicate in some configs
    return llama_like(
        reader,
        scale=reader.number("query_pre_attn_scalar") ** -0.5,
        activation=reader.activation("hidden_activation"),
        **_gemma_parts(reader),
        **options,
    )


def _gemma_parts(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(head_dim=256, tie_word_embeddings=True)
    return {
        "norm": rms_norm(reader, weight_offset=1.0),
        "embedding_scale": reader.size("hidden_size") ** 0.5,
        **attention_biases(reader),
    }


# --- norms elsewhere, LayerNorm ----------------------------------------------------------------------------------


def _olmo(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu")
    norm = NormConfig(kind="layer", eps=1e-5, weight=False)
    clip = reader.number_or_none("clip_qkv")
    return llama_like(reader, norm=norm, clip_qkv=clip, **attention_biases(reader))


def _olmo2(reader: ConfigReader) -> DecoderConfig:
    return llama_like(reader, **_olmo2_parts(reader))


def _olmo3(reader: ConfigReader) -> DecoderConfig:
    reader.assume(sliding_window=4096, rope_theta=500_000.0)
    window, ropes = reader.size_or_none("sliding_window"), read_ropes_by_kind(reader, read_head_dim(reader))
    layers = read_layers(reader, window=window, slides=lambda i: (i + 1) % 4 != 0, ropes=ropes)
    return llama_like(reader, layers=layers, **_olmo2_parts(reader))


def _olmo2_parts(reader: ConfigReader) -> dict[str, Any]:
    reader.assume(hidden_act="silu")
    return {"names": _NORMS_AFTER, "qk_norm": rms_norm(reader), "qk_norm_heads": "all", **attention_biases(reader)}


def _exaone4(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", sliding_window=4096, sliding_window_pattern=4)
    window, pattern = reader.size_or_none("sliding_window"), 0
    if window and reader.get("layer_types") is None:
        pattern = reader.size("sliding_window_pattern")
    reader.get("sliding_window_pattern")  # where both stand, it may be a word
    layers = read_layers(
        reader,
        window=window,
        slides=lambda i: (i + 1) % pattern != 0,
        turns=lambda i, slides: slides or not window,
    )
    return llama_like(reader, layers=layers, names=_NORMS_AFTER, qk_norm=rms_norm(reader))


def _stablelm(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", partial_rotary_factor=0.25)
    parallel = reader.flag("use_parallel_residual")
    return llama_like(
        reader,
        layers=read_layers(reader, partial_rotary=True),
        norm=layer_norm(reader, "layer_norm_eps"),
        names=_ONE_NORM if parallel else TensorNames(),
        parallel=parallel,
        qkv_bias=reader.flag("use_qkv_bias"),
    )


def _starcoder2(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, use_bias=True)
    reader.expect("mlp_type", "default")
    reader.expect("norm_type", "layer_norm")
    reader.expect("activation_function", reader.get("hidden_act"))  # a duplicate
    bias = reader.flag("use_bias")
    return llama_like(
        reader,
        layers=read_layers(reader, window=reader.size_or_none("sliding_window")),
        norm=layer_norm(reader, "norm_epsilon"),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        **ungated(reader, "c_fc", "c_proj"),
    )


def _nemotron(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="relu2", partial_rotary_factor=0.5)
    return llama_like(
        reader,
        layers=read_layers(reader, partial_rotary=True),
        norm=layer_norm(reader, "norm_eps", weight_offset=1.0),
        mlp_bias=reader.flag("mlp_bias"),
        **attention_biases(reader),
        **ungated(reader, "up_proj", "down_proj"),
    )


def _jais2(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="relu2", attention_bias=True, mlp_bias=True)
    return llama_like(
        reader,
        norm=layer_norm(reader, "layer_norm_eps"),
        mlp_bias=reader.flag("mlp_bias"),
        **attention_biases(reader),
        **ungated(reader, "up_proj", "down_proj"),
    )


# --- packed matrices, attention beside the MLP, interleaved pairs -------------------------------------------------


def _phi3(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", partial_rotary_factor=1.0)
    for name in ("full_attn_mod", "interpolate_factor"):
        reader.expect(name, 1)
    return llama_like(
        reader,
        layers=read_layers(reader, window=reader.size_or_none("sliding_window"), partial_rotary=True),
        names=TensorNames(qkv=("qkv_proj",), mlp_inputs=("gate_up_proj",)),
    )


def _phi(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="gelu_new", partial_rotary_factor=0.5)
    names = TensorNames(
        mlp_norm="",
        attention_output="dense",
        mlp_inputs=("fc1",),
        mlp_output="fc2",
        final_norm="final_layernorm",
    )
    return llama_like(
        reader,
        layers=read_layers(reader, partial_rotary=True),
        norm=layer_norm(reader, "layer_norm_eps"),
        names=names,
        parallel=True,
        gated=False,
        head_bias=True,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )


def _cohere(reader: ConfigReader) -> DecoderConfig:
    reader.assume(rope_theta=500_000.0)
    return _any_cohere(reader, read_layers(reader))


def _cohere2(reader: ConfigReader) -> DecoderConfig:
    reader.assume(sliding_window=4096)
    for name in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):
        reader.expect(name, True)
    reader.expect("position_embedding_type", "rope_gptj")
    reader.expect("order_of_interleaved_layers", "local_attn_first")
    reader.expect("rotary_pct", 1.0)
    pattern = reader.size("sliding_window_pattern", reader.size("layer_switch", 4))
    layers = read_layers(
        reader,
        window=reader.size_or_none("sliding_window"),
        slides=lambda i: (i + 1) % pattern != 0,
        turns=lambda i, slides: slides,
    )
    return _any_cohere(reader, layers)


def _any_cohere(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    reader.assume(hidden_act="silu", tie_word_embeddings=True)
    return llama_like(
        reader,
        layers=layers,
        norm=NormConfig(kind="layer", eps=reader.number("layer_norm_eps")),
        names=_ONE_NORM,
        parallel=True,
        logit_scale=reader.number("logit_scale", 0.0625),
        interleaved_rotary=True,
        **attention_biases(reader),
    )


def _helium(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", head_dim=128, rope_theta=100_000.0)
    return llama_like(
        reader,
        interleaved_rotary=True,
        qkv_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
    )


def _glm(reader: ConfigReader) -> DecoderConfig:
    return _any_glm(reader, TensorNames(mlp_inputs=("gate_up_proj",)))


def _glm4(reader: ConfigReader) -> DecoderConfig:
    names = TensorNames(
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
        mlp_inputs=("gate_up_proj",),
    )
    return _any_glm(reader, names)


def _any_glm(reader: ConfigReader, names: TensorNames) -> DecoderConfig:
    reader.assume(hidden_act="silu", head_dim=128, partial_rotary_factor=0.5, attention_bias=True)
    layers, bias = read_layers(reader, partial_rotary=True), reader.flag("attention_bias")
    return llama_like(reader, layers=layers, names=names, interleaved_rotary=True, qkv_bias=bias)


def _ernie4_5(reader: ConfigReader) -> DecoderConfig:
    reader.assume(hidden_act="silu", head_dim=128, tie_word_embeddings=True, rope_theta=500_000.0)
    bias = reader.flag("use_bias")
    return llama_like(
        reader,
        interleaved_rotary=True,
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )


FAMILIES: dict[str, Callable[[ConfigReader], DecoderConfig]] = {
    "ArceeForCausalLM": _arcee,
    "Cohere2ForCausalLM": _cohere2,
    "CohereForCausalLM": _cohere,
    "CwmForCausalLM": _cwm,
    "Ernie4_5ForCausalLM": _ernie4_5,
    "Exaone4ForCausalLM": _exaone4,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_images,
    "GemmaForCausalLM": _gemma,
    "Glm4ForCausalLM": _glm4,
    "GlmForCausalLM": _glm,
    "GraniteForCausalLM": _granite,
    "HeliumForCausalLM": _helium,
    "HyperCLOVAXForCausalLM": _hyperclovax,
    "Jais2ForCausalLM": _jais2,
    "LlamaForCausalLM": _llama,
    "MinistralForCausalLM": _mistral,
    "MistralForCausalLM": _mistral,
    "NemotronForCausalLM": _nemotron,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "OlmoForCausalLM": _olmo,
    "Phi3ForCausalLM": _phi3,
    "PhiForCausalLM": _phi,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
    "VaultGemmaForCausalLM": _vaultgemma,
}
