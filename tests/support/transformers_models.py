"""Tiny random checkpoints of architectures that only transformers knows, and teacher-forced access to them."""

import json
import logging
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from support.forward import CPU, Teacher, make_sequence
from torch import Tensor

from kvrelay.engine.batch import build_batch
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.models.registry import load_model
from kvrelay.engine.step import Scheduled
from kvrelay.kernels.dispatch import get_kernels

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LIMIT = 128
VOCAB = 331

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 89,  # odd, so that rows end where torch changes from one code to another
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": LIMIT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2}

# model_type -> settings, of the families that are tested: each has something that the ones before it have not.
FAMILIES: dict[str, dict[str, Any]] = {
    # Learned positions, transposed weights, LayerNorm, GELU by tanh.
    "gpt2": {"n_inner": 89, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 89, "word_embed_proj_dim": 40},  # positions from 2 on, projections around the layers, ReLU
    "gpt_neox": {"rotary_pct": 0.25},  # Pythia: partial rotary, one tensor for q, k and v, parallel layers, erf GELU
    "gptj": {"n_inner": 89, "rotary_dim": 4},  # rotary over neighbouring pairs
    "gpt_bigcode": {"n_inner": 89},  # one KV head
    "persimmon": {},  # LayerNorm of queries and keys, squared ReLU
    "mixtral": {"num_local_experts": 4, "sliding_window": 20} | _GROUPED,
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 25, "shared_expert_intermediate_size": 41} | _GROUPED,
    "olmoe": {"num_experts": 8, "intermediate_size": 25, "clip_qkv": 3.0} | _GROUPED,
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 3.0, "embedding_multiplier": 2.0} | _GROUPED,
    # Our decoder's own families, for what their attention asks for: windows by layer, scores capped, logits capped.
    "gemma2": {"head_dim": 12, "sliding_window": 20, "attn_logit_softcapping": 5.0} | _GROUPED,
    "llama": {"head_dim": 12} | _GROUPED,
}


def make_transformers_model(folder: Path, model_type: str, *, seed: int = 0, **settings: Any) -> Path:
    """Write a random float32 checkpoint as transformers does, with a context limit of 128. Returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = AutoConfig.for_model(model_type, **(_SIZES | FAMILIES.get(model_type, {}) | settings))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Matrices keep the size of what they multiply, so that greedy output varies; norms and biases are as they were.
        scaled = noise * 2.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter.data + 0.2 * noise
        parameter.data.copy_(scaled)
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    names = ("vocab_size",) if "n_positions" in stored else ("vocab_size", "max_position_embeddings")
    for name in names:  # transformers leaves out what is its default; checkpoints in the wild do not
        stored.setdefault(name, getattr(config, name, LIMIT))
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def reference_logits(folder: Path, token_ids: Seq[int]) -> Tensor:
    """[T, V], by transformers alone, all tokens in one go."""
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


class TransformersTeacher(Teacher):
    """A model in transformers' own modules with a small pool, which holds NaN wherever nothing was written."""

    def __init__(
        self, folder: Path, *, block_size: int = 16, num_blocks: int = 60, dtype: torch.dtype = torch.float32
    ) -> None:
        self.kernels = get_kernels(CPU)
        self.decoder = load_model(read_model_info(folder), dtype, self.kernels, CPU, "transformers")
        layout = KVLayout(
            num_layers=self.decoder.num_layers,
            num_kv_heads=self.decoder.num_kv_heads,
            head_dim=self.decoder.head_dim,
            block_size=block_size,
            dtype=str(dtype).removeprefix("torch."),
        )
        self.cache = KVCache(layout, num_blocks)

    @torch.inference_mode()
    def logits_among(self, token_ids: Seq[int], others: Seq[Seq[int]], cut: int) -> Tensor:
        """As `logits`, cut once, with other sequences before and behind it in both steps."""
        self.cache.pool.fill_(torch.nan)
        block_size = self.cache.layout.block_size
        num_blocks = -(-LIMIT // block_size)
        everyone = [others[0], token_ids, *others[1:]]
        sequences = [
            make_sequence(ids, range(i * num_blocks, (i + 1) * num_blocks), f"r{i}") for i, ids in enumerate(everyone)
        ]
        pieces = []
        for step in (0, 1):
            scheduled = [
                Scheduled(s, [0, min(cut, s.num_tokens - 1)][step], [min(cut, s.num_tokens - 1), s.num_tokens][step])
                for s in sequences
            ]
            batch = build_batch(scheduled, block_size, self.kernels.row_multiple, CPU)
            hidden = self.decoder.forward(batch, self.cache.pool)
            first = scheduled[0].num_new_tokens
            pieces.append(self.decoder.logits(hidden[first : first + scheduled[1].num_new_tokens]).clone())
        return torch.cat(pieces)
