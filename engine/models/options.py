"""What a decoder can be, as data: every option that some family of models uses. Defaults are Llama's.

The decoder reads these and knows no family; `families.py` fills them in from a checkpoint's config.json.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]  # the kernels' own names, here without torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies lower by one factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequencies of waves longer than the original context lower by a factor, short waves kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequencies lower by a factor, by how often a pair turns within the original context: fast pairs kept."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency divided by a number of its own."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of the first `rotary_dim` elements of each head."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None
    magnitude: float = 1.0  # of cosines and sines


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs between the layers of one model."""

    window: int  # a token sees itself and the window - 1 tokens before it; 0: all
    rope: RopeConfig | None  # None: no position embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """RMSNorm, or LayerNorm."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    weight_offset: float = 0.0  # the checkpoint's weights are what is to be added to this


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Where the checkpoint has what. A norm without a name is not there.

    One name where there are several matrices: they are packed in one tensor, their rows one after the other.
    """

    trunks: tuple[str, ...] = ("model",)  # what holds embeddings, layers and final norm: one of these
    final_norm: str = "norm"
    other_parts: tuple[str, ...] = ()  # beginnings of the names of what is no part of the decoder
    # Within a layer:
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    attention_output: str = "o_proj"
    mlp_inputs: tuple[str, ...] = ("gate_proj", "up_proj")  # or the only one, where nothing is gated
    mlp_output: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: grouped-query attention and an MLP a layer, in residual blocks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    names: TensorNames = TensorNames()

    tie_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0  # rounded to the weights' dtype
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none

    parallel: bool = False  # attention and MLP read the same input and are added together
    residual_scale: float = 1.0  # of what attention and MLP add

    scale: float  # of the attention scores
    attention_softcap: float = 0.0
    clip_qkv: float = 0.0  # queries, keys and values end at plus and minus this; 0: nowhere
    interleaved_rotary: bool = False  # the checkpoint's pairs are (2i, 2i + 1), not (i, i + R)
    qk_norm: NormConfig | None = None
    qk_norm_heads: Literal["each", "all"] = "each"  # normed by themselves, or as one vector
    qkv_bias: bool = False
    attention_output_bias: bool = False

    activation: Activation = "silu"
    gated: bool = True  # activation(gate(x)) * up(x), or activation(up(x))
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        assert not (self.interleaved_rotary and self.qk_norm), "the norm's weights would have to be reordered too"

    @property
    def num_layers(self) -> int:
        return len(self.layers)
