"""What config.json may say, and what is refused by name."""

from typing import Any

import pytest

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.config import decoder_config

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


def test_what_a_config_leaves_out_has_the_familys_default() -> None:
    config = decoder_config(LLAMA)
    assert (config.head_dim, config.rope.theta, config.tie_embeddings, config.windows) == (
        8,
        10_000.0,
        False,
        (0, 0, 0),
    )
    assert decoder_config({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 6
    assert decoder_config({**LLAMA, "head_dim": 20}).head_dim == 20


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_rope_is_read_under_its_old_and_new_names(rope: dict[str, Any]) -> None:
    assert decoder_config(LLAMA | rope).rope.theta == 500.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "expected 3"),
    ],
)
def test_what_is_not_known_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    """F02: a scaling that is not applied, or applied wrongly, answers garbage; so does any other ignored setting."""
    with pytest.raises(ModelError) as error:
        decoder_config(LLAMA | settings)
    assert named in error.value.message


@pytest.mark.parametrize("value", [None, False, 0, {}])
def test_an_unknown_setting_that_is_off_is_no_reason_to_refuse(value: object) -> None:
    decoder_config({**LLAMA, "some_new_feature": value})


def test_windows_are_the_layers_own() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert decoder_config(mistral).windows == (16, 16, 16)
    assert decoder_config(mistral | {"sliding_window": None}).windows == (0, 0, 0)
    assert decoder_config(QWEN2).windows == (0, 0, 0)
    assert decoder_config(QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}).windows == (0, 0, 16)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert decoder_config(QWEN2 | {"use_sliding_window": True, "layer_types": kinds}).windows == (16, 0, 16)


def test_only_qwen2_has_biases_without_being_told() -> None:
    assert decoder_config(QWEN2).qkv_bias
    assert not decoder_config(QWEN2).output_bias
    assert not decoder_config(LLAMA).qkv_bias
    assert decoder_config(LLAMA | {"attention_bias": True}).output_bias
