"""Whatever a config.json says, it is understood or refused by name: no other error, no memory taken for a number."""

from typing import Any

from hypothesis import given, settings as limits, strategies as st

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.config import decoder_config
from kvrelay.engine.models.families import FAMILIES
from kvrelay.engine.models.rope import frequencies

SETTINGS: dict[str, Any] = {
    "attention_bias": False,
    "attention_multiplier": 0.2,
    "attn_logit_softcapping": None,
    "clip_qkv": 1.0,
    "embedding_multiplier": 2.0,
    "head_dim": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-5,
    "layer_types": ["full_attention"] * 3,
    "logit_scale": 0.1,
    "max_position_embeddings": 128,
    "max_window_layers": 2,
    "no_rope_layers": [1, 1, 0],
    "norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 1e4,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 320,
}
numbers = st.integers(-2, 200) | st.sampled_from([10**12, 10**400, -(10**30)]) | st.floats()
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
lists = st.lists(st.floats(0.5, 2), min_size=3, max_size=5)
rope = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"]) | values},
    optional={
        "factor": numbers,
        "low_freq_factor": numbers,
        "high_freq_factor": numbers,
        "original_max_position_embeddings": numbers,
        "beta_fast": numbers,
        "attention_factor": numbers,
        "mscale": numbers,
        "mscale_all_dim": numbers,
        "rope_theta": numbers,
        "partial_rotary_factor": numbers,
        "short_factor": lists | values,
        "long_factor": lists | values,
    },
)
ropes = rope | st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), rope | values) | values


@limits(max_examples=200)
@given(
    architecture=st.sampled_from(sorted(FAMILIES)) | values,
    wrapped=st.booleans(),
    dropped=st.sets(st.sampled_from(sorted(SETTINGS)), max_size=20),
    changed=st.dictionaries(st.sampled_from(sorted(SETTINGS)), values, max_size=3),
    rope_parameters=ropes,
    rope_scaling=ropes,
)
def test_any_config_is_understood_or_refused(
    architecture: Any,
    wrapped: bool,
    dropped: set[str],
    changed: dict[str, Any],
    rope_parameters: Any,
    rope_scaling: Any,
) -> None:
    """F02"""
    settings = {name: value for name, value in SETTINGS.items() if name not in dropped} | changed
    settings |= {"rope_parameters": rope_parameters, "rope_scaling": rope_scaling}
    settings |= {"architectures": [architecture] if wrapped or isinstance(architecture, str) else architecture}
    if architecture == "Gemma3ForConditionalGeneration":
        settings = {"architectures": [architecture], "text_config": settings}
    try:
        config = decoder_config(settings)
    except ModelError:
        return
    for rope in {layer.rope for layer in config.layers if layer.rope is not None}:
        assert 2 <= rope.rotary_dim <= config.head_dim
        assert rope.rotary_dim > 4096 or frequencies(rope).isfinite().all()
