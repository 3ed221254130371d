"""Teacher-forced access to a model: the logits of every position of given tokens, computed in given pieces."""

from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.batch import build_batch
from kvrelay.engine.config import Quantization
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.models.registry import load_model
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.step import Scheduled
from kvrelay.kernels.dispatch import KernelsChoice, get_kernels

CPU = torch.device("cpu")


def make_sequence(token_ids: Iterable[int], block_table: Seq[int], request_id: str = "r", **sampling: Any) -> Sequence:
    """A sequence that owns the blocks, greedy unless told otherwise."""
    params = SamplingParams(**{"max_tokens": 1000, "seed": 1, "temperature": 0.0, **sampling})
    request = Request(key=RequestKey(request_id, 0), prompt_token_ids=tuple(token_ids), sampling=params)
    return Sequence(request=request, block_table=list(block_table))


class Teacher:
    """A decoder with a small pool of its own, which holds NaN wherever nothing was written."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        num_blocks: int = 40,
        dtype: str = "float32",
        kernels: KernelsChoice = "auto",
        quantization: Quantization = "none",
        gguf: Path | None = None,
    ) -> None:
        self.kernels = get_kernels(CPU, kernels)
        info = read_model_info(folder, gguf=gguf)
        self.decoder = model = load_model(info, getattr(torch, dtype), self.kernels, CPU, "kvrelay", quantization)
        layout = KVLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
        self.cache = KVCache(layout, num_blocks)

    @torch.inference_mode()
    def logits(self, token_ids: Seq[int], cuts: Seq[int] = (), first_block: int = 3) -> Tensor:
        """[len(token_ids), V]; `cuts` are the positions at which a new piece starts."""
        self.cache.pool.fill_(torch.nan)
        num_blocks = -(-len(token_ids) // self.cache.layout.block_size)
        sequence = make_sequence(token_ids, range(first_block, first_block + num_blocks))
        pieces = []
        for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
            scheduled = [Scheduled(sequence, start, end)]
            batch = build_batch(scheduled, self.cache.layout.block_size, self.kernels.row_multiple, CPU)
            hidden = self.decoder.forward(batch, self.cache.pool)
            pieces.append(self.decoder.logits(hidden[: end - start]).clone())  # the next step writes over them
        return torch.cat(pieces)
