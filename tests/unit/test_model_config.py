"""What config.json may say, and what is refused by name."""

from typing import Any

import pytest

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.config import decoder_config, is_known
from kvrelay.engine.models.families import FAMILIES
from kvrelay.engine.models.options import DecoderConfig, LinearScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "_name_or_path": "somewhere",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
# The name of a norm's epsilon, where it is not Llama's.
EPS = dict.fromkeys(("Cohere", "Cohere2", "Jais2", "Phi", "StableLm"), "layer_norm_eps")
EPS |= {"Starcoder2": "norm_epsilon", "Nemotron": "norm_eps", "Olmo": ""}


def family(name: str, **settings: Any) -> dict[str, Any]:
    """A config of a family, with as little in it as will do."""
    own = {"architectures": [f"{name}ForCausalLM"], "rms_norm_eps": None, EPS.get(name, "rms_norm_eps"): 1e-5}
    act = {"hidden_act": "gelu_pytorch_tanh"} if name == "Gemma" else {}
    return {key: value for key, value in (LLAMA | own | act | settings).items() if key}


def windows(config: DecoderConfig) -> list[int]:
    return [layer.window for layer in config.layers]


def turns(config: DecoderConfig) -> list[bool]:
    return [layer.rope is not None for layer in config.layers]


def refusal(hf: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        decoder_config(hf)
    return error.value.message


def test_what_a_config_leaves_out_has_the_familys_default() -> None:
    config = decoder_config(LLAMA)
    assert (config.head_dim, config.tie_embeddings, windows(config)) == (8, False, [0, 0, 0])
    assert {layer.rope.theta for layer in config.layers if layer.rope} == {10_000.0}
    assert decoder_config({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 6
    assert decoder_config({**LLAMA, "head_dim": 20}).head_dim == 20
    assert decoder_config(family("Gemma2")).head_dim == 256
    assert decoder_config(family("Gemma2")).tie_embeddings
    assert not decoder_config(family("Gemma2", tie_word_embeddings=False)).tie_embeddings
    assert (decoder_config(family("Gemma2")).attention_softcap, decoder_config(family("Gemma2")).logit_softcap) == (
        50,
        30,
    )
    assert decoder_config(family("Gemma2", attn_logit_softcapping=None)).attention_softcap == 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 500.0}},
    ],
)
def test_rope_is_read_under_its_old_and_new_names(rope: dict[str, Any]) -> None:
    (layer, *_) = decoder_config(LLAMA | rope).layers
    assert layer.rope is not None
    assert layer.rope.theta == 500.0


def test_gemma3_and_olmo3_scale_full_attention_alone_under_the_old_names() -> None:
    gemma = decoder_config(
        family(
            "Gemma3",
            sliding_window=16,
            sliding_window_pattern=2,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        )
    )
    assert windows(gemma) == [16, 0, 16]
    ropes = [layer.rope for layer in gemma.layers]
    assert [rope.theta for rope in ropes if rope] == [1e4, 1e6, 1e4]
    assert [rope.scaling for rope in ropes if rope] == [None, LinearScaling(factor=8.0), None]
    olmo = decoder_config(family("Olmo3", num_hidden_layers=4, sliding_window=16, rope_theta=2e4))
    assert windows(olmo) == [16, 16, 16, 0]
    assert {layer.rope.theta for layer in olmo.layers if layer.rope} == {2e4}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "expected 3 of full_attention"),
        ({"layer_types": ["full_attention"]}, "expected 3"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_what_is_not_known_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    """F02: a scaling that is not applied, or applied wrongly, answers garbage; so does any other ignored setting."""
    assert named in refusal(LLAMA | settings)


LISTS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "ntk"}, "'ntk'"),
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, "'mrope'"),
        ({"rope_type": None, "type": "proportional"}, "'proportional'"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "factor = -2"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor = inf"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, "beta_fast = 32"),
        ({"rope_type": "default", "factor": 2}, "factor = 2"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "dynamic", "factor": 2, "alpha": 1000}, "alpha = 1000"),
        (
            {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 64},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4, "truncate": 1}, "truncate = 1"),
        ({"rope_type": "yarn", "factor": 4, **LISTS}, "short_factor"),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": "32"},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor"),
        ({"rope_type": "longrope", **LISTS, "long_factor": [2.0] * 3}, "long_factor"),
        ({"rope_type": "longrope", **LISTS, "long_factor": [2.0, 2.0, 0, 2.0]}, "long_factor"),
        ({"type": "su", **LISTS, "short_mscale": 1.1}, "short_mscale"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_a_rope_that_is_not_known_is_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    """F02"""
    for where in ("rope_parameters", "rope_scaling"):
        assert named in refusal(LLAMA | {where: scaling})


@pytest.mark.parametrize(
    ("hf", "named"),
    [
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        (LLAMA | {"rope_theta": 0}, "rope_theta"),
        (LLAMA | {"rope_theta": 1}, "rope_theta = 1"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (family("Glm", head_dim=6), "partial_rotary_factor = 0.5"),
        (family("Glm", head_dim=8, partial_rotary_factor=2.0), "partial_rotary_factor = 2.0"),
        (family("Mistral", sliding_window=-1), "sliding_window = -1"),
        (family("Mistral", attention_bias=True), "attention_bias = True"),
        (family("Qwen2", use_sliding_window=True, max_window_layers="all"), "max_window_layers"),
        (family("SmolLM3", no_rope_layers=[1, 0]), "no_rope_layers"),
        (family("SmolLM3", no_rope_layers=[1, 0, 2]), "no_rope_layers"),
        (family("Gemma", hidden_activation="relu"), "hidden_activation = 'relu'"),
        (family("Gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (family("Gemma3", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (family("Gemma3", rope_parameters={"linear_attention": {"rope_type": "default"}}), "linear_attention"),
        (family("Gemma3", rope_parameters={"full_attention": {"rope_type": "ntk"}}), "rope_parameters.full_attention"),
        (family("Cohere", use_qk_norm=True), "use_qk_norm"),
        (family("Cohere2", use_parallel_block=False), "use_parallel_block"),
        (family("StableLm", qk_layernorm=True), "qk_layernorm"),
        (family("Starcoder2", norm_type="rms_norm"), "norm_type"),
        (family("Exaone4", sliding_window_pattern="LLG"), "sliding_window_pattern"),
        (family("Olmo", clip_qkv=-1), "clip_qkv"),
        (family("Granite", residual_multiplier=0), "residual_multiplier"),
        (family("Phi3", interpolate_factor=2), "interpolate_factor"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(hf: dict[str, Any], named: str) -> None:
    """F02"""
    assert named in refusal(hf)


@pytest.mark.parametrize("value", [None, False, 0, {}])
def test_an_unknown_setting_that_is_off_is_no_reason_to_refuse(value: object) -> None:
    decoder_config({**LLAMA, "some_new_feature": value})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_refuses_a_setting_that_it_does_not_know(architecture: str) -> None:
    hf = family(architecture.removesuffix("ForCausalLM"), head_dim=8) | {"architectures": [architecture]}
    if architecture == "Gemma3ForConditionalGeneration":
        hf = {"architectures": [architecture], "text_config": family("Gemma3")}
        assert "text_config: some_new_feature = 1" in refusal(
            {**hf, "text_config": hf["text_config"] | {"some_new_feature": 1}}
        )
    assert is_known(hf)
    decoder_config(hf)
    assert "some_new_feature = 1" in refusal(hf | {"some_new_feature": 1})


def test_windows_are_the_layers_own() -> None:
    mistral = family("Mistral", sliding_window=16)
    assert windows(decoder_config(mistral)) == [16, 16, 16]
    assert windows(decoder_config(mistral | {"sliding_window": None})) == [0, 0, 0]
    assert windows(decoder_config(QWEN2)) == [0, 0, 0]
    assert windows(decoder_config(QWEN2 | {"use_sliding_window": True, "max_window_layers": 2})) == [0, 0, 16]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(decoder_config(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})) == [16, 0, 16]
    assert windows(decoder_config(family("Gemma2", sliding_window=16))) == [16, 0, 16]
    assert windows(decoder_config(family("Gemma2", sliding_window=16, layer_types=kinds[::-1]))) == [16, 0, 16]
    assert windows(decoder_config(family("Cwm", sliding_window=16))) == [0, 16, 16]


def test_some_layers_have_no_position_embedding() -> None:
    assert turns(decoder_config(family("SmolLM3", no_rope_layer_interval=3))) == [True, True, False]
    assert turns(decoder_config(family("SmolLM3", no_rope_layers=[0, 1, 1]))) == [False, True, True]
    cohere = family("Cohere2", sliding_window=16, sliding_window_pattern=2)
    assert turns(decoder_config(cohere)) == [True, False, True]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    exaone = family("Exaone4", sliding_window=16, sliding_window_pattern="LLG", layer_types=kinds)
    assert turns(decoder_config(exaone)) == [True, True, False]
    whole = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3}
    assert turns(decoder_config(exaone | whole)) == [True, True, True]


def test_only_qwen2_has_biases_without_being_told() -> None:
    assert decoder_config(QWEN2).qkv_bias
    assert not decoder_config(QWEN2).attention_output_bias
    assert not decoder_config(LLAMA).qkv_bias
    assert decoder_config(LLAMA | {"attention_bias": True}).attention_output_bias


def test_a_longrope_s_factors_hang_on_the_model_s_context_and_on_no_request() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    hf = family("Phi3", original_max_position_embeddings=64, rope_scaling={"type": "longrope", **lists})
    for context, divisor in ((128, 2.0), (64, 1.0)):
        (layer, *_) = decoder_config(hf | {"max_position_embeddings": context}).layers
        assert layer.rope is not None
        assert getattr(layer.rope.scaling, "divisors", ()) == (divisor,) * 4
