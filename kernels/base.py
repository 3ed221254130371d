"""What a set of kernels offers: the operations of a decoder's forward pass, for one kind of device.

Every implementation computes the same functions as `reference`, within its dtype's rounding; tests/conformance holds
them to it. Kernels import nothing of kvrelay and know no model, no request and no scheduler.

Shapes: T tokens of a batch (rows), S sequences, H heads, K KV heads, D head dim, R pairs turned (at most D / 2), N
blocks of the pool, B tokens a block, M block table entries, C input features, O output features, G groups of inputs, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

_SMALLEST_FLOAT32 = 2.0**-126  # of full precision

# x times the logistic function of x; x times the normal distribution's (exactly, and by tanh); max(x, 0) squared.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] as the kernels that packed it want it; nobody else looks inside."""

    data: Tensor
    num_outputs: int
    num_inputs: int
    form: object = None  # what else those kernels have to know of it


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix as small whole numbers, for rows of `dtype`: each value is code * scale + minimum.

    Groups of an output's inputs share a scale, and a minimum where there are any. Products with rows of bfloat16 are
    `reference.integer_linear`, to the bit. Others have the bits of products with the values unpacked: rounded to
    float32 and then to `dtype`; a code times its scale must be exact in float32 (scales of 16 significant bits are),
    so that only the sum is rounded.
    """

    codes: Tensor  # [O, C], int8; of 4 bits: 0 to 15, or -8 to 7 where there are no minimums
    scales: Tensor  # [O, G], float32, or float16; the last group may be short
    minimums: Tensor | None  # as the scales
    bits: Literal[4, 8]
    group: int  # inputs; 16 or 32
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, outputs: slice | Tensor) -> "QuantisedWeight":
        """Some of the outputs."""
        minimums = None if self.minimums is None else self.minimums[outputs]
        return replace(self, codes=self.codes[outputs], scales=self.scales[outputs], minimums=minimums)

    def unpacked(self) -> Tensor:
        """The matrix [O, C] that this is."""
        num_inputs = self.codes.shape[1]

        def spread(values_OG: Tensor) -> Tensor:
            return values_OG.float().repeat_interleave(self.group, dim=1)[:, :num_inputs]

        values = self.codes.float() * spread(self.scales)
        if self.minimums is not None:
            values += spread(self.minimums)
        return values.to(self.dtype)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows of a batch belong to which sequence, and where the sequences' keys and values lie.

    Rows [query_starts[s], query_starts[s+1]) are the last tokens of sequence s, which has seq_lens[s] tokens with them.
    Rows beyond query_starts[S] are padding. Entries of a block table beyond ceil(seq_lens[s] / B) are never read.
    """

    query_starts: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]
    block_tables: Tensor  # [S, M]


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens to draw from one row of logits, by what `sampling.distribution` keeps of them."""

    row: int
    numbers: Sequence[float]  # in [0, 1), multiples of 2^-52: one a token
    temperature: float = 1.0  # above 0
    min_p: float = 0.0  # a token less likely than this times the likeliest is left out
    top_k: int = 0  # of the others these are kept, the likeliest; 0: all
    top_p: float = 1.0  # and of those the fewest that hold this share

    @property
    def scale(self) -> float:
        """What differences of logits are multiplied by, in float32. Never 0, which would make a NaN of a -inf."""
        return max(1 / self.temperature, _SMALLEST_FLOAT32)


class Kernels(Protocol):
    """The operations a decoder is made of. None keeps state; all but `reshape_and_cache` return new tensors."""

    @property
    def name(self) -> str:
        """One word, for logs."""

    @property
    def row_multiple(self) -> int:
        """Batches whose number of rows is a multiple of this need no padding inside the kernels."""

    def pack(self, weight_OC: Tensor) -> PackedWeight:
        """Prepare a weight once, at load time. May keep the tensor itself, mapped file and all."""

    def pack_quantised(self, weight: QuantisedWeight) -> PackedWeight:
        """Prepare a quantised weight once. What products with it are: `QuantisedWeight`."""

    def linear(self, x_TC: Tensor, weight: PackedWeight, bias_O: Tensor | None = None) -> Tensor:
        """x times the weight transposed, plus the bias. Returns [T, num_outputs]."""

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """Scale each row to a root mean square of one, then by the weight, whose dtype may be wider than x's."""

    def layer_norm(self, x_TC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, eps: float) -> Tensor:
        """Shift and scale each row to a mean of zero and a variance of one, then by the weight and the bias, if any."""

    def rotary(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """Turn each head's pairs (i, i + R) by the row's angles; elements from 2R on stay as they are."""

    def activate(self, x_TC: Tensor, activation: Activation, up_TC: Tensor | None = None) -> Tensor:
        """activation(x), times `up` where there is one."""

    def reshape_and_cache(self, k_TKD: Tensor, v_TKD: Tensor, kv_N2KBD: Tensor, slot_mapping_T: Tensor) -> None:
        """Write each row's key and value into its slot of one layer; a slot of -1 is padding and writes nothing.

        A slot is block * B + offset. Raises: ValueError if one lies outside the pool (CPU kernels only).
        """

    def paged_attention(
        self,
        q_THD: Tensor,
        kv_N2KBD: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of each row over its sequence's cached keys and values, its own among them.

        `window`: a row sees itself and the window - 1 tokens before it; 0: all before it. `softcap`: scores become
        softcap * tanh(scores / softcap); 0: as they are. Returns [T, H, D]; padding rows are zero.
        """

    def scan(self, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row of floats, one at least: its largest [R], the first place that has it [R], int64, and whether all
        are finite [R]. Largest and place mean nothing where one is NaN."""

    def draw(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[list[int]]:
        """The tokens of each draw, to the bit those of `sampling.draw`. A row may be drawn from more than once.

        Each such row's largest logit is finite, and none is NaN.
        """

    def total_weights(self, logits_RV: Tensor) -> Tensor:
        """The sum of each row's weights at temperature 1 [R], int64: those of `sampling.weigh`, to the bit."""

    def likeliest(self, logits_RV: Tensor, count: int) -> Tensor:
        """Ids [R, count] of each row's largest logits, the largest first; of equals the lower id first. None is NaN."""
