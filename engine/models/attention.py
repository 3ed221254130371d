"""One layer's attention: project, norm, rotate, write the cache, attend over it, project back.

Shapes: T tokens of the batch, H heads, K KV heads, D head dim, R pairs of a head that turn, N blocks, B block size, C
hidden size, X features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.layers import Norm, Projection, take_matrices
from kvrelay.engine.models.loader import Checkpoint, Matrix
from kvrelay.engine.models.options import DecoderConfig, LayerConfig
from kvrelay.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What every layer's attention is given alike."""

    batch: ForwardBatch
    turns: list[tuple[Tensor, Tensor]]  # cosines and sines [T, R] of each rope


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        rope: int | None,
        kernels: Kernels,
        checkpoint: Checkpoint,
        path: str,
    ) -> None:
        """`rope`: its number; None: the layer does not turn."""
        names, head_dim = config.names, config.head_dim
        query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        sizes = (query_size, kv_size, kv_size)
        q, k, v = take_matrices(checkpoint, path, names.qkv, sizes, config.hidden_size, config.qkv_bias)
        if config.interleaved_rotary and layer.rope is not None:
            q, k = (_in_halves(matrix, head_dim, layer.rope.rotary_dim) for matrix in (q, k))
        self.q, self.k, self.v = (Projection(kernels, *matrix) for matrix in (q, k, v))
        (output,) = take_matrices(
            checkpoint, path, (names.attention_output,), (config.hidden_size,), query_size, config.attention_output_bias
        )
        self.output = Projection(kernels, *output)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            q_size, k_size = (head_dim, head_dim) if config.qk_norm_heads == "each" else (query_size, kv_size)
            self.q_norm = Norm(kernels, checkpoint, f"{path}.{names.q_norm}", config.qk_norm, q_size)
            self.k_norm = Norm(kernels, checkpoint, f"{path}.{names.k_norm}", config.qk_norm, k_size)
        self._kernels = kernels
        self._config = config
        self.window = layer.window
        self.rope = rope

    def __call__(self, x_TC: Tensor, shared: AttentionInput, kv_N2KBD: Tensor) -> Tensor:
        """`kv_N2KBD`: this layer's part of the pool, written and read."""
        kernels, config = self._kernels, self._config
        q_THD = self._heads(self.q(x_TC), self.q_norm)
        k_TKD = self._heads(self.k(x_TC), self.k_norm)
        v_TKD = self._heads(self.v(x_TC))
        if self.rope is not None:
            cos, sin = shared.turns[self.rope]
            q_THD, k_TKD = kernels.rotary(q_THD, cos, sin), kernels.rotary(k_TKD, cos, sin)
        kernels.reshape_and_cache(k_TKD, v_TKD, kv_N2KBD, shared.batch.slot_mapping)
        out_THD = kernels.paged_attention(
            q_THD,
            kv_N2KBD,
            shared.batch.attention,
            scale=config.scale,
            window=self.window,
            softcap=config.attention_softcap,
        )
        return self.output(out_THD.flatten(1))

    def _heads(self, x_TX: Tensor, norm: Norm | None = None) -> Tensor:
        if self._config.clip_qkv:
            x_TX = x_TX.clamp(-self._config.clip_qkv, self._config.clip_qkv)
        if norm is not None:
            x_TX = norm(x_TX.reshape(-1, norm.size)).reshape(x_TX.shape)
        return torch.unflatten(x_TX, -1, (-1, self._config.head_dim))


def _in_halves(matrix: tuple[Matrix, Tensor | None], head_dim: int, rotary_dim: int) -> tuple[Matrix, Tensor | None]:
    """Outputs in another order within each head: pairs (2i, 2i + 1) become pairs (i, i + R), as the kernels turn them.

    Of queries and keys alike, so that their products stay what they were.
    """
    turned = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    order = torch.cat([turned, torch.arange(rotary_dim, head_dim)])
    weight, bias = matrix
    outputs = (torch.arange(0, weight.shape[0], head_dim)[:, None] + order).flatten()
    return weight[outputs], None if bias is None else bias[outputs]
