"""Runs a model for the engine thread: from scheduled tokens to sampled ones, over the KV pool it owns."""

import os
from collections.abc import Sequence as Seq
from typing import Any

import torch

from kvrelay.engine.batch import build_batch
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ConfigError, ModelError
from kvrelay.engine.kv_cache import KVCache, num_blocks_for
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.config import decoder_config
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.engine.sampler import Sampler, SampleRow
from kvrelay.engine.step import RowResult, Scheduled
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.dispatch import get_kernels

_log = get_logger(__name__)


class ModelRunner:
    """The one-worker `Executor`: model, KV pool and sampler in the calling thread."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, kernels: Kernels, *, eos_token_ids: Seq[int], max_model_len: int
    ) -> None:
        self.max_model_len = max_model_len
        self._decoder = decoder
        self._cache = cache
        self._kernels = kernels
        self._sampler = Sampler(eos_token_ids)

    @classmethod
    def load(cls, info: ModelInfo, config: EngineConfig) -> "ModelRunner":
        """Load a model and make its KV pool. Sets torch's number of threads, which is the process's.

        Raises: ModelError, ConfigError.
        """
        max_model_len = config.max_model_len or info.max_model_len
        if max_model_len > info.max_model_len:
            raise ConfigError(f"max_model_len = {max_model_len}: the model's own limit is {info.max_model_len}")
        if config.device != "cpu":
            raise ConfigError(f"device = {config.device}: this version computes on the CPU only")
        device = torch.device(config.device)
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        dtype = _dtype(info, config)
        model = decoder_config(info.config)
        layout = KVLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            dtype=dtype,
        )
        kernels = get_kernels(device)
        decoder = Decoder(model, Checkpoint(info.path, getattr(torch, dtype), device), kernels, device)
        cache = KVCache(layout, num_blocks_for(config, layout))
        cache.populate()
        _log.info(
            "model_loaded",
            extra=fields(
                model=info.name, dtype=dtype, num_threads=torch.get_num_threads(), num_kv_blocks=cache.num_blocks
            ),
        )
        return cls(decoder, cache, kernels, eos_token_ids=info.eos_token_ids, max_model_len=max_model_len)

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def region(self) -> Any:
        """The pool as bytes: a writable numpy array, uint8 [num_blocks, block_bytes], the same memory, not a copy."""
        return self._cache.region

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        """Zero a block's slots [first_slot, block_size), in every layer, keys and values."""
        self._cache.zero_slots(block_id, first_slot)

    @torch.inference_mode()
    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        """Compute the tokens, write their KV, sample where a row reaches its end. Results in the order given."""
        if not scheduled:
            return []
        batch = build_batch(scheduled, self.layout.block_size, self._kernels.row_multiple, self._cache.pool.device)
        hidden = self._decoder.forward(batch, self._cache.pool)
        if not any(item.samples for item in scheduled):
            return [None] * len(scheduled)
        logits = self._decoder.logits(hidden[batch.sample_rows])
        tokens = iter(self._sampler.sample(logits, [_sample_row(item) for item in scheduled if item.samples]))
        return [next(tokens) if item.samples else None for item in scheduled]

    def close(self) -> None:
        """Stop what runs in the background."""
        self._cache.close()


def _sample_row(item: Scheduled) -> SampleRow:
    sequence = item.sequence
    return SampleRow(sequence.request.sampling, sequence.choice, sequence.token_ids, sequence.num_prompt_tokens)


def _dtype(info: ModelInfo, config: EngineConfig) -> str:
    """The dtype of weights, compute and KV; auto: the checkpoint's, as far as this CPU computes in it."""
    if config.dtype != "auto":
        return config.dtype
    stored = info.config.get("dtype") or info.config.get("torch_dtype") or "float32"
    if stored not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"{info.path}: dtype {stored!r} is not supported")
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if stored != "float32" and has_bfloat16 else "float32"
