"""Runs a model for the engine thread: from scheduled tokens to sampled ones, over the KV pool it owns."""

import os
from collections.abc import Iterator, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvrelay.engine.batch import ForwardBatch, build_batch, prompt_positions
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ConfigError, Internal, KvrelayError, ModelError
from kvrelay.engine.kv_cache import KVCache, num_blocks_for, num_host_blocks_for, share_pool
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.logprobs import NOT_FINITE, token_logprobs
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.models.base import Model
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.models.registry import load_model
from kvrelay.engine.request import Logprobs, Sequence
from kvrelay.engine.sampler import Sampler, SampleRow
from kvrelay.engine.seen_tokens import SeenTokens
from kvrelay.engine.step import Row, RowResult, Sampled, Scheduled
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.dispatch import get_kernels

_PROMPT_ROWS = 64  # whose logits are in memory at once

_log = get_logger(__name__)


class ModelRunner:
    """The one-worker `Executor`: model, KV pool and sampler in the calling thread."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        kernels: Kernels,
        *,
        eos_token_ids: Seq[int],
        max_model_len: int,
        num_threads: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.num_threads = num_threads  # that compute
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._sampler = Sampler(eos_token_ids, kernels)
        self._seen = WeakKeyDictionary[Sequence, SeenTokens]()  # of those with penalties
        # Compiled code leaves nothing for torch to note down, and to enter the mode takes 40 us of a step.
        self._mode: AbstractContextManager[None] = (
            nullcontext() if isinstance(model, CompiledDecoder) else torch.inference_mode()
        )

    @classmethod
    def load(cls, info: ModelInfo, config: EngineConfig, *, shares_pool: bool = False) -> "ModelRunner":
        """Load a model and make its KV pool. Sets torch's number of threads, which is the process's: one, where
        compiled kernels run all of the model.

        `shares_pool`: where other processes of this host can map it, if that costs no speed.

        Raises: ModelError, ConfigError.
        """
        max_model_len = config.max_model_len or info.max_model_len
        if max_model_len > info.max_model_len:
            raise ConfigError(f"max_model_len = {max_model_len}: the model's own limit is {info.max_model_len}")
        if config.device != "cpu":
            raise ConfigError(f"device = {config.device}: this version computes on the CPU only")
        device = torch.device(config.device)
        num_threads = config.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(num_threads)
        dtype = _dtype(info, config)
        kernels = get_kernels(device, config.kernels, config.nice)
        model = load_model(info, getattr(torch, dtype), kernels, device, config.model_impl, config.quantization)
        if isinstance(model, CompiledDecoder):
            model.reserve(config.max_num_batched_tokens, max(config.max_num_seqs, _PROMPT_ROWS))
            torch.set_num_threads(1)  # the kernels have threads of their own; a second team would spin beside them
        layout = KVLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            dtype=dtype,
        )
        num_blocks = num_blocks_for(config, layout)
        shared = share_pool(layout, num_blocks) if shares_pool else None
        cache = KVCache(layout, num_blocks, num_host_blocks=num_host_blocks_for(config, layout), shared=shared)
        cache.populate()
        _log.info(
            "model_loaded",
            extra=fields(
                model=info.name,
                dtype=dtype,
                quantization=config.quantization,
                kernels=kernels.name,
                num_threads=num_threads,
                num_kv_blocks=cache.num_blocks,
                num_host_blocks=cache.num_host_blocks,
            ),
        )
        eos_token_ids = info.eos_token_ids
        return cls(
            model, cache, kernels, eos_token_ids=eos_token_ids, max_model_len=max_model_len, num_threads=num_threads
        )

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def kernels_name(self) -> str:
        return self._kernels.name

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that `swap_out` can write to."""
        return self._cache.num_host_blocks

    @property
    def region(self) -> Any:
        """The pool as bytes: a writable numpy array, uint8 [num_blocks, block_bytes], the same memory, not a copy."""
        return self._cache.region

    @property
    def region_fd(self) -> int | None:
        """The memfd that holds the pool, if other processes may map it."""
        return self._cache.region_fd

    def copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks: (from, to) each, one after the other."""
        self._cache.copy_blocks(copies)

    def swap_out(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks to host memory: (block, host block) each."""
        self._cache.swap_out(copies)

    def swap_in(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks back: (host block, block) each."""
        self._cache.swap_in(copies)

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        """Zero a block's slots [first_slot, block_size), in every layer, keys and values."""
        self._cache.zero_slots(block_id, first_slot)

    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        """Compute the tokens, write their KV, sample where a row reaches its end. Results in the order given."""
        if not scheduled:
            return []
        with self._mode:
            return self._execute(scheduled)

    def _execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        batch = build_batch(scheduled, self.layout.block_size, self._kernels.row_multiple, self._cache.pool.device)
        sampled: list[tuple[Sampled, ...] | KvrelayError] = []
        if batch.num_sampled:
            hidden, logits = self._model.run(batch, self._cache.pool)
            rows = [self._sample_row(item.sequence) for item in scheduled if item.samples]
            sampled = self._sampler.sample(logits, rows)
        else:
            hidden = self._model.forward(batch, self._cache.pool)
        found = self._prompt_logprobs(hidden, batch, scheduled)
        tokens = iter(sampled)
        return [
            _result(
                next(tokens) if item.samples else (),
                [next(found) if position else Logprobs() for position in prompt_positions(item)],
            )
            for item in scheduled
        ]

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        sampling = sequence.request.sampling
        seen = None
        if sampling.penalises and (seen := self._seen.get(sequence)) is None:
            seen = self._seen[sequence] = SeenTokens(sequence.num_prompt_tokens)
        return SampleRow(
            sampling, sequence.choices, sequence.token_ids, sequence.num_prompt_tokens, sequence.matcher, seen
        )

    def _prompt_logprobs(
        self, hidden: Tensor, batch: ForwardBatch, scheduled: Seq[Scheduled]
    ) -> Iterator[Logprobs | None]:
        """How likely the prompt token after each of the prompt's rows was, a few rows at a time; None: logits not
        finite."""
        wanted = [
            (item.sequence.token_ids[position], item.sequence.request.sampling.prompt_logprobs or 0)
            for item in scheduled
            for position in prompt_positions(item)
            if position > 0
        ]
        for start in range(0, len(wanted), _PROMPT_ROWS):
            piece = slice(start, start + _PROMPT_ROWS)
            logits = self._model.logits(hidden[batch.prompt_rows[piece]])
            token_ids, num_likeliest = zip(*wanted[piece], strict=True)
            for found in token_logprobs(logits, [(token_id,) for token_id in token_ids], num_likeliest, self._kernels):
                yield None if found is None else found[0]

    def close(self) -> None:
        """Stop what runs in the background."""
        self._cache.close()


def _result(sampled: tuple[Sampled, ...] | KvrelayError, prompt: Seq[Logprobs | None]) -> RowResult:
    if isinstance(sampled, KvrelayError):
        return sampled
    if not prompt:
        return Row(sampled)
    known = tuple(logprobs for logprobs in prompt if logprobs is not None)
    return Row(sampled, known) if len(known) == len(prompt) else Internal(NOT_FINITE)


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
