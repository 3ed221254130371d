"""One layer's attention: project, rotate, write the cache, attend over it, project back.

Shapes: T tokens of the batch, H heads, K KV heads, D head dim, R = D / 2, N blocks, B block size, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.config import DecoderConfig
from kvrelay.engine.models.layers import Projection
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What every layer's attention is given alike."""

    batch: ForwardBatch
    cos: Tensor  # [T, R]
    sin: Tensor


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, checkpoint: Checkpoint, name: str, window: int) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._kernels = kernels
        self._head_dim = head_dim
        self._scale = config.scale
        self._window = window
        self._q = Projection(kernels, checkpoint, f"{name}.q_proj", hidden, query_size, config.qkv_bias)
        self._k = Projection(kernels, checkpoint, f"{name}.k_proj", hidden, kv_size, config.qkv_bias)
        self._v = Projection(kernels, checkpoint, f"{name}.v_proj", hidden, kv_size, config.qkv_bias)
        self._o = Projection(kernels, checkpoint, f"{name}.o_proj", query_size, hidden, config.output_bias)

    def __call__(self, x_TC: Tensor, shared: AttentionInput, kv_N2KBD: Tensor) -> Tensor:
        """`kv_N2KBD`: this layer's part of the pool, written and read."""
        kernels, heads = self._kernels, (-1, self._head_dim)
        q_THD = kernels.rotary(torch.unflatten(self._q(x_TC), -1, heads), shared.cos, shared.sin)
        k_TKD = kernels.rotary(torch.unflatten(self._k(x_TC), -1, heads), shared.cos, shared.sin)
        v_TKD = torch.unflatten(self._v(x_TC), -1, heads)
        kernels.reshape_and_cache(k_TKD, v_TKD, kv_N2KBD, shared.batch.slot_mapping)
        out_THD = kernels.paged_attention(
            q_THD, kv_N2KBD, shared.batch.attention, scale=self._scale, window=self._window
        )
        return self._o(out_THD.flatten(1))
