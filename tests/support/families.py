"""Tiny random models of every family, made by transformers: the oracle, and a checkpoint as it saves one."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 331
WINDOW = 16
CONTEXT = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,  # unlike hidden_size / num_attention_heads
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_WINDOW = {"sliding_window": WINDOW}
_SOME_SLIDE = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
_HEAD_OF_12 = {"head_dim": None, "hidden_size": 72}  # where it is always hidden_size / num_attention_heads
_HEAD_OF_16 = {"head_dim": None, "hidden_size": 96}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MULTIPLIERS = {
    "attention_multiplier": 0.21,
    "embedding_multiplier": 3.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
_BIASES = {"attention_bias": True, "mlp_bias": True}

# Name of the case -> (class of transformers, without Config, settings).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {}),
    "cohere": ("Cohere", {"num_key_value_heads": 3, "logit_scale": 0.4} | _HEAD_OF_12),
    "cohere2": ("Cohere2", {"sliding_window_pattern": 3, "logit_scale": 0.4} | _WINDOW | _HEAD_OF_12),
    "cwm": ("Cwm", _WINDOW),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "exaone4": ("Exaone4", _WINDOW),
    "exaone4 without a window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0} | _WINDOW),
    "gemma3": ("Gemma3Text", {"sliding_window_pattern": 3, "query_pre_attn_scalar": 20} | _WINDOW),
    "gemma3 with images": ("Gemma3", {}),
    "gemma3 capped and scaled": (
        "Gemma3Text",
        {"final_logit_softcapping": 4.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        | _WINDOW
        | _SOME_SLIDE,
    ),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {"attention_bias": True}),
    "granite": ("Granite", _MULTIPLIERS | _BIASES),
    "helium": ("Helium", {"head_dim": 12, "hidden_size": 72}),
    "hyperclovax": ("HyperCLOVAX", _MULTIPLIERS),
    "jais2": ("Jais2", {}),
    "llama": ("Llama", {"rope_theta": 500.0}),
    "llama with biases": ("Llama", {"tie_word_embeddings": True} | _BIASES),
    "ministral": ("Ministral", _WINDOW | _SOME_SLIDE),
    "mistral": ("Mistral", _WINDOW),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {"clip_qkv": 0.9} | _HEAD_OF_12),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _WINDOW),
    "phi": ("Phi", {"num_key_value_heads": 6} | _HEAD_OF_12),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.75} | _WINDOW | _HEAD_OF_16),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2} | _WINDOW | _HEAD_OF_12),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "seed_oss": ("SeedOss", {"attention_out_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 3} | _HEAD_OF_12),
    "smollm3 with windows": ("SmolLM3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]} | _WINDOW),
    "stablelm": ("StableLm", {"use_qkv_bias": True} | _HEAD_OF_16),
    "stablelm parallel": ("StableLm", {"use_parallel_residual": True} | _HEAD_OF_16),
    "starcoder2": ("Starcoder2", _WINDOW | _HEAD_OF_12),
    "vaultgemma": ("VaultGemma", _WINDOW),
}


def make_model(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Save a random checkpoint of a family with these settings, and return the model of transformers.

    Raises: what transformers does.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    name, own = FAMILIES[family]
    merged = {key: value for key, value in (_SIZES | own | settings).items() if (key, value) != ("head_dim", None)}
    auto = transformers.AutoModelForCausalLM
    if family == "gemma3 with images":
        merged = {"text_config": merged | _WINDOW | _SOME_SLIDE, "vision_config": _VISION, "mm_tokens_per_image": 4}
        auto = transformers.AutoModelForImageTextToText
    config = getattr(transformers, f"{name}Config")(**merged)
    model = auto.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_random(parameter_name, parameter, generator))
    model.save_pretrained(folder)
    return model


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scaled so that activations keep their size and every part counts."""
    values = torch.randn(parameter.shape, generator=generator)
    if "embed_tokens" in name:
        return values * 0.5
    if parameter.ndim == 2:
        return values * 2 / parameter.shape[1] ** 0.5
    return parameter + 0.2 * values if name.endswith("weight") else 0.2 * values
