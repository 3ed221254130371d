"""Writes Hugging Face checkpoints as GGUF files the way llama.cpp's conversion does: the other direction, written from
its rules (docs/models.md names them) and the gguf package's own names, knowing nothing of our reader."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

BOS, EOS = "<|begin|>", "<|end|>"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "i n", "a n", "r e", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ċ Ċ", "' s"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def permute(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves to pairs: (i, i + D / 2) come to stand side by side."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


@dataclass(frozen=True, slots=True)
class Form:
    """What an architecture's conversion does beyond the rest."""

    arch: gguf.MODEL_ARCH
    permuted: bool = False
    norm_plus_one: bool = False
    extra: Callable[["_Writer", Any], None] = lambda writer, config: None


class _Writer(gguf.GGUFWriter):
    """Keys that differ by architecture."""

    def windows(self, config: Any) -> None:
        if "sliding_attention" in config.layer_types:
            self.add_sliding_window(config.sliding_window)

    def gemma2(self, config: Any) -> None:
        self.add_attn_logit_softcapping(config.attn_logit_softcapping)
        self.gemma3(config)

    def gemma3(self, config: Any) -> None:
        self.windows(config)
        if config.final_logit_softcapping:
            self.add_final_logit_softcapping(config.final_logit_softcapping)

    def pattern(self, config: Any) -> None:
        self.windows(config)
        self.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])

    def phi3(self, config: Any) -> None:
        rope = config.rope_parameters
        self.add_sliding_window(config.sliding_window or 0)
        self.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        self.add_rope_dimension_count(int(rope["partial_rotary_factor"] * config.hidden_size / 6))
        if rope["rope_type"] == "longrope":
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            self.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            factor = math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
            self.add_rope_scaling_attn_factors(factor)
            self.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
            self.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))

    def granite(self, config: Any) -> None:
        self.add_attention_scale(config.attention_multiplier)
        self.add_embedding_scale(config.embedding_multiplier)
        self.add_residual_scale(config.residual_multiplier)
        self.add_logit_scale(config.logits_scaling)

    def olmo(self, config: Any) -> None:
        self.add_layer_norm_eps(1e-5)
        self.add_clamp_kqv(config.clip_qkv)

    def llama3(self, config: Any) -> None:
        """The tensor that Llama 3's scaling becomes."""
        rope = config.rope_parameters
        if rope["rope_type"] != "llama3":
            return
        original, low, high = (rope[k] for k in ("original_max_position_embeddings", *_FREQUENCIES))
        factors = []
        for i in range(0, config.head_dim, 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config.head_dim)
            smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        self.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


_FREQUENCIES = ("low_freq_factor", "high_freq_factor")
_ARCH = gguf.MODEL_ARCH
FORMS = {
    "ArceeForCausalLM": Form(_ARCH.ARCEE, permuted=True),
    "GemmaForCausalLM": Form(_ARCH.GEMMA, norm_plus_one=True),
    "Gemma2ForCausalLM": Form(_ARCH.GEMMA2, norm_plus_one=True, extra=_Writer.gemma2),
    "Gemma3ForCausalLM": Form(_ARCH.GEMMA3, norm_plus_one=True, extra=_Writer.gemma3),
    "GraniteForCausalLM": Form(_ARCH.GRANITE, permuted=True, extra=_Writer.granite),
    "LlamaForCausalLM": Form(_ARCH.LLAMA, permuted=True, extra=_Writer.llama3),
    "MistralForCausalLM": Form(_ARCH.LLAMA, permuted=True),
    "OlmoForCausalLM": Form(_ARCH.OLMO, permuted=True, extra=_Writer.olmo),
    "Olmo2ForCausalLM": Form(_ARCH.OLMO2),
    "Olmo3ForCausalLM": Form(_ARCH.OLMO2, extra=_Writer.pattern),
    "Phi3ForCausalLM": Form(_ARCH.PHI3, extra=_Writer.phi3),
    "Qwen2ForCausalLM": Form(_ARCH.QWEN2),
    "Qwen3ForCausalLM": Form(_ARCH.QWEN3),
    "SeedOssForCausalLM": Form(_ARCH.SEED_OSS),
    "SmolLM3ForCausalLM": Form(_ARCH.SMOLLM3, permuted=True),
    "Starcoder2ForCausalLM": Form(_ARCH.STARCODER2),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says of text."""

    model: str
    tokens: list[str]
    kinds: list[int]
    pre: str | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)  # e.g. eos_token_id
    template: Any = None

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        for values, add in ((self.pre, writer.add_tokenizer_pre), (self.merges, writer.add_token_merges)):
            if values is not None:
                add(values)  # type: ignore[operator]
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.template is not None:
            writer.add_chat_template(self.template)
        for key, value in self.keys.items():
            name = f"tokenizer.ggml.{key}"
            writer.add_bool(name, value) if isinstance(value, bool) else writer.add_uint32(name, value)


def byte_level_vocabulary(size: int = 0, *, pre: str = "gpt-2", merges: list[str] | None = None) -> Vocabulary:
    """256 bytes, a few merges, BOS and EOS, and tokens that stand for nothing up to `size`."""
    merges = MERGES if merges is None else merges
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    bos, normal = len(tokens), gguf.TokenType.NORMAL
    kinds = [normal] * bos + [gguf.TokenType.CONTROL] * 2
    tokens += [BOS, EOS]
    padding = max(0, size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(padding)]
    kinds += [gguf.TokenType.UNUSED] * padding
    keys = {"bos_token_id": bos, "eos_token_id": bos + 1}
    return Vocabulary("gpt2", tokens, [int(kind) for kind in kinds], pre, merges, keys=keys, template=TEMPLATE)


def write_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    *,
    vocabulary: Vocabulary | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> Path:
    """Write transformers' `model` with its matrices as `kind`. `change`: more keys or tensors. Returns the path."""
    config = model.config
    form = FORMS[type(model).__name__]
    names = gguf.get_tensor_name_map(form.arch, config.num_hidden_layers)
    writer = _Writer(path, gguf.MODEL_ARCH_NAMES[form.arch], **options)
    _add_settings(writer, config)
    form.extra(writer, config)
    (vocabulary or byte_level_vocabulary(config.vocab_size)).add_to(writer)
    change(writer)
    tied = config.tie_word_embeddings
    for name, weights in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        values = weights.float()
        if form.permuted and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permute(values, heads)
        if form.norm_plus_one and name.endswith("norm.weight"):
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(found, values.numpy())
        else:
            writer.add_tensor(found, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: _Writer, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_file_type(0)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for name, add in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full is not rope and rope["sliding_attention"]["rope_theta"] != 10_000.0:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
