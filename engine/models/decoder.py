"""One decoder for the Llama family; what differs between its members is in DecoderConfig.

    tokens -> embed -> [ x += attention(norm(x));  x += mlp(norm(x)) ] * num_layers -> norm -> logits

Shapes: T tokens of the batch, C hidden size, R rows, V vocabulary, N blocks, L layers, K KV heads, B block size, D head
dim.
"""

import re

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.attention import Attention, AttentionInput
from kvrelay.engine.models.config import DecoderConfig
from kvrelay.engine.models.layers import GatedMlp, Norm
from kvrelay.engine.models.loader import Checkpoint
from kvrelay.engine.models.rope import Rope
from kvrelay.kernels.base import Kernels

_RECOMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in some old checkpoints


class Decoder:
    """The model: from a batch of tokens and the KV pool to hidden states, and from those to logits."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, kernels: Kernels, device: torch.device) -> None:
        """Takes every tensor of the checkpoint. Raises: ModelError."""
        self._kernels = kernels
        self._rope = Rope(config.rope, device)
        self._embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [_Layer(config, kernels, checkpoint, i) for i in range(config.num_layers)]
        self._norm = Norm(kernels, checkpoint, "model.norm", config.hidden_size, config.rms_norm_eps)
        head = self._embedding
        if not config.tie_embeddings:
            head = checkpoint.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = kernels.pack(head)
        # Where the embeddings are tied, some checkpoints hold a copy of them under the head's name.
        checkpoint.finish(lambda name: name == "lm_head.weight" or _RECOMPUTED.fullmatch(name) is not None)

    def forward(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> Tensor:
        """Hidden states [T, C] of the batch's tokens, whose keys and values are written into the pool."""
        x_TC = embedding(batch.token_ids, self._embedding)
        shared = AttentionInput(batch, *self._rope.cos_sin(batch.positions))
        for i, layer in enumerate(self._layers):
            x_TC = layer(x_TC, shared, pool_NL2KBD[:, i])
        return x_TC

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] in float32, of some rows of `forward`'s hidden states."""
        return self._kernels.linear(self._norm(hidden_RC), self._head).float()


class _Layer:
    def __init__(self, config: DecoderConfig, kernels: Kernels, checkpoint: Checkpoint, i: int) -> None:
        name, size, eps = f"model.layers.{i}", config.hidden_size, config.rms_norm_eps
        self._attention_norm = Norm(kernels, checkpoint, f"{name}.input_layernorm", size, eps)
        self._attention = Attention(config, kernels, checkpoint, f"{name}.self_attn", config.windows[i])
        self._mlp_norm = Norm(kernels, checkpoint, f"{name}.post_attention_layernorm", size, eps)
        self._mlp = GatedMlp(config, kernels, checkpoint, f"{name}.mlp")

    def __call__(self, x_TC: Tensor, shared: AttentionInput, kv_N2KBD: Tensor) -> Tensor:
        x_TC = x_TC + self._attention(self._attention_norm(x_TC), shared, kv_N2KBD)
        return x_TC + self._mlp(self._mlp_norm(x_TC))
