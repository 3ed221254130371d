"""From a GGUF file's architecture to a Hugging Face checkpoint: config.json, names, and what a conversion had changed.

An architecture is a row: its class in transformers, its tensors' names, its settings beyond the common ones, and two
things that llama.cpp's conversion does to weights, which are undone: rows of the query and key projections reordered
for another form of rotary embedding, and 1 added to the weights of norms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.gguf_rope import rope_parameters
from kvrelay.engine.gguf_settings import Settings

ARCHITECTURE = "general.architecture"
_GELU = "gelu_pytorch_tanh"

# Parts of a tensor's name, in GGUF and within a layer of the checkpoint.
_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUTPUT_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2_NAMES = _LLAMA_NAMES | _OUTPUT_NORM_NAMES | {"ffn_norm": "pre_feedforward_layernorm"}
_OLMO_NAMES = {name: hf for name, hf in _LLAMA_NAMES.items() if name not in ("attn_norm", "ffn_norm")}
_PHI3_NAMES = {name: hf for name, hf in _LLAMA_NAMES.items() if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")}
_SEED_NAMES = {name: hf for name, hf in _LLAMA_NAMES.items() if name != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm"
}
_UNGATED_NAMES = {name: hf for name, hf in _LLAMA_NAMES.items() if name != "ffn_gate"}


@dataclass(frozen=True, slots=True)
class Source:
    """What a row's function reads: the file's settings and tensors, and the sizes found already."""

    settings: Settings
    gguf: Gguf
    num_layers: int
    head_dim: int

    def has_bias(self, name: str) -> bool:
        return f"blk.0.{name}.bias" in self.gguf.tensors

    def rope(self, **options: Any) -> dict[str, Any]:
        return rope_parameters(self.settings, self.gguf.tensors, self.head_dim, **options)


def _rms(source: Source) -> dict[str, Any]:
    return {"rms_norm_eps": source.settings.number("attention.layer_norm_rms_epsilon")}


def _llama(source: Source) -> dict[str, Any]:
    biases = {"attention_bias": source.has_bias("attn_q"), "mlp_bias": source.has_bias("ffn_down")}
    return {"rope_parameters": source.rope(), "hidden_act": "silu", **biases, **_rms(source)}


def _arcee(source: Source) -> dict[str, Any]:
    return _llama(source) | {"hidden_act": "relu2"}


def _granite(source: Source) -> dict[str, Any]:
    settings = source.settings
    settings.expect("rope.scaling.finetuned", True)  # false: no position embedding
    return _llama(source) | {
        "attention_multiplier": settings.number("attention.scale", 1.0),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
    }


def _smollm3(source: Source) -> dict[str, Any]:
    return _llama(source) | {"no_rope_layer_interval": 4}


def _qwen2(source: Source) -> dict[str, Any]:
    return {"rope_parameters": source.rope(), "hidden_act": "silu", "use_sliding_window": False, **_rms(source)}


def _qwen3(source: Source) -> dict[str, Any]:
    return _qwen2(source) | {"attention_bias": source.has_bias("attn_q")}


def _seed_oss(source: Source) -> dict[str, Any]:
    return _llama(source) | {"attention_out_bias": source.has_bias("attn_output")}


def _phi3(source: Source) -> dict[str, Any]:
    context = source.settings.size("context_length")
    return {
        "rope_parameters": source.rope(),
        "original_max_position_embeddings": source.settings.size("rope.scaling.original_context_length", context),
        "sliding_window": source.settings.get("attention.sliding_window") or None,
        "hidden_act": "silu",
        **_rms(source),
    }


def _olmo(source: Source) -> dict[str, Any]:
    source.settings.expect("attention.layer_norm_epsilon", 1e-5)
    clip = source.settings.number_or_none("attention.clamp_kqv")
    return {"rope_parameters": source.rope(), "hidden_act": "silu", "clip_qkv": clip}


def _starcoder2(source: Source) -> dict[str, Any]:
    return {
        "rope_parameters": source.rope(),
        "hidden_act": _GELU,
        "norm_epsilon": source.settings.number("attention.layer_norm_epsilon"),
        "use_bias": source.has_bias("attn_q"),
    }


def _gemma(source: Source) -> dict[str, Any]:
    return {"rope_parameters": source.rope(), "hidden_act": _GELU, "hidden_activation": _GELU, **_rms(source)}


def _gemma2(source: Source) -> dict[str, Any]:
    return {
        "rope_parameters": source.rope(),
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": _query_scalar(source, layers_of_27b=46),
        "attn_logit_softcapping": source.settings.number_or_none("attn_logit_softcapping"),
        "final_logit_softcapping": source.settings.number_or_none("final_logit_softcapping"),
        **_layer_types(source, every=2, window=4096),
        **_rms(source),
    }


def _gemma3(source: Source) -> dict[str, Any]:
    return {
        "rope_parameters": _ropes_by_kind(source, theta=1_000_000.0, sliding_theta=10_000.0),
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": _query_scalar(source, layers_of_27b=62),
        "final_logit_softcapping": source.settings.number_or_none("final_logit_softcapping"),
        **_layer_types(source, every=6),
        **_rms(source),
    }


def _olmo2(source: Source) -> dict[str, Any]:
    return {"rope_parameters": source.rope(), "hidden_act": "silu", **_rms(source)}


def _olmo3(source: Source) -> dict[str, Any]:
    ropes = _ropes_by_kind(source, theta=500_000.0, sliding_theta=source.settings.number("rope.freq_base", 500_000.0))
    return {"rope_parameters": ropes, "hidden_act": "silu", **_layer_types(source, every=4), **_rms(source)}


def _ropes_by_kind(source: Source, *, theta: float, sliding_theta: float) -> dict[str, Any]:
    """Only layers that see everything are scaled. The thetas: where the file has none."""
    sliding_theta = source.settings.number("rope.freq_base_swa", sliding_theta)
    return {
        "full_attention": source.rope(theta=theta),
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding_theta},
    }


def _layer_types(source: Source, *, every: int, window: int = 0) -> dict[str, Any]:
    """every: which layers see everything, where the file does not say; window: of the others, likewise; 0: all do."""
    settings, key = source.settings, "attention.sliding_window_pattern"
    window = settings.get("attention.sliding_window", window)
    slide = settings.flags(key, source.num_layers)
    if slide is None:
        every = settings.size(key, every)
        slide = [(i + 1) % every != 0 for i in range(source.num_layers)]
    if not window:  # transformers asks for a number all the same
        return {
            "layer_types": ["full_attention"] * source.num_layers,
            "sliding_window": settings.size("context_length"),
        }
    kinds = ["sliding_attention" if slides else "full_attention" for slides in slide]
    return {"layer_types": kinds, "sliding_window": settings.size("attention.sliding_window", window)}


def _query_scalar(source: Source, *, layers_of_27b: int) -> int:
    """It is not in the file: the head's size, but for the largest model of each generation."""
    if source.num_layers != layers_of_27b:
        return source.head_dim
    return source.settings.size("embedding_length") // source.settings.size("attention.head_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A row; `permuted`: rows of the query and key projections; `norm_offset`: what had been added to norms."""

    hf: str
    model_type: str
    read: Callable[[Source], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    permuted: bool = False
    norm_offset: float = 0.0


_ARCHITECTURES = {
    "arcee": Architecture(hf="ArceeForCausalLM", model_type="arcee", read=_arcee, names=_UNGATED_NAMES, permuted=True),
    "gemma": Architecture(hf="GemmaForCausalLM", model_type="gemma", read=_gemma, norm_offset=1.0),
    "gemma2": Architecture(
        hf="Gemma2ForCausalLM", model_type="gemma2", read=_gemma2, names=_GEMMA2_NAMES, norm_offset=1.0
    ),
    "gemma3": Architecture(
        hf="Gemma3ForCausalLM",
        model_type="gemma3_text",
        read=_gemma3,
        names=_GEMMA2_NAMES | _QK_NORM_NAMES,
        norm_offset=1.0,
    ),
    "granite": Architecture(hf="GraniteForCausalLM", model_type="granite", read=_granite, permuted=True),
    "llama": Architecture(hf="LlamaForCausalLM", model_type="llama", read=_llama, permuted=True),
    "olmo": Architecture(hf="OlmoForCausalLM", model_type="olmo", read=_olmo, names=_OLMO_NAMES, permuted=True),
    "olmo2": Architecture(
        hf="Olmo2ForCausalLM",
        model_type="olmo2",
        read=_olmo2,
        names=_OLMO_NAMES | _OUTPUT_NORM_NAMES | _QK_NORM_NAMES,
    ),
    "phi3": Architecture(
        hf="Phi3ForCausalLM",
        model_type="phi3",
        read=_phi3,
        names=_PHI3_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "qwen2": Architecture(hf="Qwen2ForCausalLM", model_type="qwen2", read=_qwen2),
    "qwen3": Architecture(hf="Qwen3ForCausalLM", model_type="qwen3", read=_qwen3, names=_LLAMA_NAMES | _QK_NORM_NAMES),
    "seed_oss": Architecture(
        hf="SeedOssForCausalLM",
        model_type="seed_oss",
        read=_seed_oss,
        names=_SEED_NAMES,
    ),
    "smollm3": Architecture(hf="SmolLM3ForCausalLM", model_type="smollm3", read=_smollm3, permuted=True),
    "starcoder2": Architecture(
        hf="Starcoder2ForCausalLM",
        model_type="starcoder2",
        read=_starcoder2,
        names=_UNGATED_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}
# One architecture in GGUF, two in transformers: with windows it is the later one.
_WINDOWED = {
    "olmo2": Architecture(hf="Olmo3ForCausalLM", model_type="olmo3", read=_olmo3, names=_ARCHITECTURES["olmo2"].names)
}


def find_architecture(gguf: Gguf) -> Architecture:
    """Raises: ModelError for one that is not in the table, and for a file that is no language model."""
    kind, name = gguf.metadata.get("general.type", "model"), gguf.metadata.get(ARCHITECTURE)
    if kind != "model":
        raise ModelError(f"{gguf.name}: general.type = {kind!r}: not a model")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{gguf.name}: {ARCHITECTURE} = {name!r} is not supported; supported: {known}")
    if name in _WINDOWED and gguf.metadata.get(f"{name}.attention.sliding_window"):
        return _WINDOWED[name]
    return _ARCHITECTURES[name]


def read_config(gguf: Gguf, architecture: Architecture) -> dict[str, Any]:
    """config.json, but for the special tokens and the dtype. Raises: ModelError, naming what is wrong or unknown."""
    settings = Settings(gguf.name, str(gguf.metadata[ARCHITECTURE]), gguf.metadata)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.name}: token_embd.weight is missing, or is no matrix")
    hidden_size, num_heads = settings.size("embedding_length"), settings.size("attention.head_count")
    head_dim = settings.size("attention.key_length", hidden_size // num_heads)
    settings.expect("attention.value_length", head_dim)
    settings.expect("attention.causal", True)
    num_layers = settings.size("block_count")
    if num_layers > len(gguf.tensors):
        raise settings.error("block_count", f"the file has {len(gguf.tensors)} tensors")
    config = {
        "architectures": [architecture.hf],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.size("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **architecture.read(Source(settings, gguf, num_layers, head_dim)),
    }
    settings.refuse_unread()
    return config
