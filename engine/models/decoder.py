"""One decoder for many families of models; what differs between them is in DecoderConfig.

    tokens -> embed -> [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] * num_layers -> norm -> logits

Any of a layer's norms may be absent, and the two halves of a layer may stand side by side.

Shapes: T tokens of the batch, C hidden size, R rows, V vocabulary, N blocks, L layers, K KV heads, B block size, D head
dim.
"""

import re

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.attention import Attention, AttentionInput
from kvrelay.engine.models.layers import Mlp, Norm, Projection, make_norm
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.engine.models.options import DecoderConfig, LayerConfig, RopeConfig
from kvrelay.engine.models.rope import Rope
from kvrelay.kernels.base import Kernels

_EMBEDDING = "embed_tokens.weight"
# In some checkpoints: frequencies, which are computed; a copy of the embeddings, where they are the head too.
_NOT_NEEDED = re.compile(r".*\brotary_emb\.inv_freq|(.*\.)?lm_head\.weight")


class Decoder:
    """The model: from a batch of tokens and the KV pool to hidden states, and from those to logits."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, kernels: Kernels, device: torch.device) -> None:
        """Takes every tensor of the checkpoint. Raises: ModelError."""
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.config = config
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        numbers: dict[RopeConfig | None, int] = {rope: number for number, rope in enumerate(ropes)}
        names = config.names
        trunk = next((name for name in names.trunks if f"{name}.{_EMBEDDING}" in checkpoint), names.trunks[0])
        embedding = f"{trunk}.{_EMBEDDING}"
        self.embedding = checkpoint.take(embedding, config.vocab_size, config.hidden_size)
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.embedding.dtype))
        self.layers = [
            Layer(config, layer, numbers.get(layer.rope), kernels, checkpoint, f"{trunk}.layers.{i}")
            for i, layer in enumerate(config.layers)
        ]
        self.norm = Norm(kernels, checkpoint, f"{trunk}.{names.final_norm}", config.norm, config.hidden_size)
        self.ropes = [Rope(rope, device) for rope in ropes]  # as large as the heads are, which have been checked
        if config.tie_embeddings:
            head = checkpoint.head_of(embedding, self.embedding)
        else:
            head = checkpoint.take_matrix("lm_head.weight", config.vocab_size, config.hidden_size, is_head=True)
        bias = checkpoint.take("lm_head.bias", config.vocab_size) if config.head_bias else None
        self.head = Projection(kernels, head, bias)
        checkpoint.finish(lambda name: _NOT_NEEDED.fullmatch(name) is not None or name.startswith(names.other_parts))

    def forward(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> Tensor:
        """Hidden states [T, C] of the batch's tokens, whose keys and values are written into the pool."""
        x_TC = embedding(batch.token_ids, self.embedding)
        if self.embedding_scale != 1:
            x_TC = x_TC * self.embedding_scale
        shared = AttentionInput(batch, [rope.cos_sin(batch.positions) for rope in self.ropes])
        for i, layer in enumerate(self.layers):
            x_TC = layer(x_TC, shared, pool_NL2KBD[:, i])
        return x_TC

    def run(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> tuple[Tensor, Tensor]:
        """`forward`, and the logits of the rows that sample, one at least."""
        hidden_TC = self.forward(batch, pool_NL2KBD)
        return hidden_TC, self.logits(hidden_TC[batch.sample_rows])

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] in float32, of some rows of `forward`'s hidden states."""
        logits_RV = self.head(self.norm(hidden_RC)).float()
        if self.config.logit_scale != 1:
            logits_RV = logits_RV * self.config.logit_scale
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits_RV / cap) if cap else logits_RV


class Layer:
    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        rope: int | None,
        kernels: Kernels,
        checkpoint: Checkpoint,
        path: str,
    ) -> None:
        names = config.names
        self.attention_norm = make_norm(kernels, checkpoint, path, names.attention_norm, config)
        self.attention = Attention(config, layer, rope, kernels, checkpoint, f"{path}.self_attn")
        self.attention_output_norm = make_norm(kernels, checkpoint, path, names.attention_output_norm, config)
        self.mlp_norm = make_norm(kernels, checkpoint, path, names.mlp_norm, config)
        self.mlp = Mlp(config, kernels, checkpoint, f"{path}.mlp")
        self.mlp_output_norm = make_norm(kernels, checkpoint, path, names.mlp_output_norm, config)
        self._parallel = config.parallel
        self._residual_scale = config.residual_scale

    def __call__(self, x_TC: Tensor, shared: AttentionInput, kv_N2KBD: Tensor) -> Tensor:
        normed_TC = _norm(self.attention_norm, x_TC)
        x_TC = self._add(x_TC, _norm(self.attention_output_norm, self.attention(normed_TC, shared, kv_N2KBD)))
        if not self._parallel:
            normed_TC = _norm(self.mlp_norm, x_TC)
        return self._add(x_TC, _norm(self.mlp_output_norm, self.mlp(normed_TC)))

    def _add(self, x_TC: Tensor, more_TC: Tensor) -> Tensor:
        return x_TC + (more_TC if self._residual_scale == 1 else more_TC * self._residual_scale)


def _norm(norm: Norm | None, x_TC: Tensor) -> Tensor:
    return x_TC if norm is None else norm(x_TC)
