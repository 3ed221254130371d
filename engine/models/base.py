"""What the model runner asks of a model, whoever wrote its layers.

Shapes: T tokens of the batch, C hidden size, R rows, V vocabulary, N blocks, L layers, K KV heads, B block size, D head
dim.
"""

from typing import Protocol

from torch import Tensor

from kvrelay.engine.batch import ForwardBatch


class Model(Protocol):
    """Weights and the forward pass over them. Keeps no state between steps: that is all in the pool."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values, all of the same shape."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int:
        """Of keys and values alike."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> Tensor:
        """Hidden states [T, C] of the batch's tokens, whose keys and values are written into the pool."""

    def run(self, batch: ForwardBatch, pool_NL2KBD: Tensor) -> tuple[Tensor, Tensor]:
        """A step: hidden states as of `forward`, with what may be behind them, and the logits of the rows that sample,
        one at least."""

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] in float32, of some rows of `forward`'s hidden states."""
