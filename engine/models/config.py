"""What kind of decoder a checkpoint's config.json describes, or why it is one that we do not build.

Nothing is guessed: an architecture, an activation, a rope type or a setting that is not known here is refused by name,
since ignoring it would load and then answer nonsense.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.engine.errors import ModelError

HfConfig = Mapping[str, Any]

# Read by no part of the forward pass: names, token ids, training and generation settings. So is what begins with "_".
_IRRELEVANT = frozenset(
    """architectures model_type torch_dtype dtype transformers_version
    transformers.js_config unsloth_version use_cache initializer_range attention_dropout pretraining_tp bos_token_id
    eos_token_id pad_token_id unk_token_id max_window_layers is_llama_config return_dict output_hidden_states
    output_attentions chunk_size_feed_forward problem_type id2label label2id""".split()  # noqa: SIM905 - one a line is no clearer
)
# Must be what the decoder does; anything else is another model.
_REQUIRED = {
    "hidden_act": ("silu",),
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head."""

    theta: float
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family: pre-norm, RMSNorm, rotary, grouped-query attention, gated MLP with SiLU."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()  # of each layer; 0: attends to everything before

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return float(self.head_dim**-0.5)


def decoder_config(hf: HfConfig) -> DecoderConfig:
    """Raises: ModelError, naming the architecture or setting that is not supported or not plausible."""
    architecture = str((hf.get("architectures") or ["none named"])[0])
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(f"architecture {architecture} is not supported; supported: {known}")
    reader = _Reader(hf)
    config = _ARCHITECTURES[architecture](reader)
    reader.refuse_unread()
    return config


class _Reader:
    """Reads settings and remembers which, so that what nobody read can be refused."""

    def __init__(self, hf: HfConfig) -> None:
        self._hf = hf
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A setting; `default` where it is absent or null."""
        self._read.add(name)
        value = self._hf.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {name} = {value!r}: expected a positive integer")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ModelError(f"config.json: {name} = {value!r}: expected a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} = {value!r}: expected true or false")
        return value

    def refuse_unread(self) -> None:
        """Raises: ModelError for a setting that is switched on and that nobody has looked at."""
        for name, value in self._hf.items():
            if name in self._read or name in _IRRELEVANT or name.startswith("_"):
                continue
            if value not in _REQUIRED[name] if name in _REQUIRED else value:
                raise ModelError(f"config.json: {name} = {value!r}: not supported")


def _llama(reader: _Reader) -> DecoderConfig:
    bias = reader.flag("attention_bias")
    return _common(reader, qkv_bias=bias, output_bias=bias, mlp_bias=reader.flag("mlp_bias"), window=0)


def _mistral(reader: _Reader) -> DecoderConfig:
    return _common(reader, window=reader.get("sliding_window", 0))


def _qwen2(reader: _Reader) -> DecoderConfig:
    window = reader.get("sliding_window", 0)  # present, and without effect, where it is not used
    window = window if reader.flag("use_sliding_window") else 0
    return _common(reader, qkv_bias=True, window=window, first_windowed=reader.get("max_window_layers", 0))


_ARCHITECTURES: dict[str, Callable[[_Reader], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
}


def _common(reader: _Reader, *, window: Any, first_windowed: Any = 0, **variant: bool) -> DecoderConfig:
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    head_dim = reader.size("head_dim", hidden_size // num_heads)
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    num_layers = reader.size("num_hidden_layers")
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: {num_heads} attention heads do not divide among {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim = {head_dim}: rotary embedding needs an even number")
    return DecoderConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=reader.size("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope=_rope(reader, head_dim),
        tie_embeddings=reader.flag("tie_word_embeddings"),
        windows=_windows(reader, num_layers, window, first_windowed),
        **variant,
    )


def _rope(reader: _Reader, head_dim: int) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as configs had it before."""
    parameters = reader.get("rope_parameters", {})
    scaling = reader.get("rope_scaling", {})
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise ModelError("config.json: rope_parameters, rope_scaling: expected objects")
    settings = {"rope_theta": reader.get("rope_theta", 10_000.0), **scaling, **parameters}
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    theta = settings.pop("rope_theta", None)
    if kind != "default":
        raise ModelError(f"config.json: rope type {kind!r} is not supported")
    for name, value in settings.items():
        if value is not None and not (name == "partial_rotary_factor" and value == 1):
            raise ModelError(f"config.json: rope setting {name} = {value!r}: not supported")
    if not isinstance(theta, int | float) or not 0 < theta < float("inf"):
        raise ModelError(f"config.json: rope_theta = {theta!r}: expected a positive number")
    return RopeConfig(theta=float(theta), head_dim=head_dim)


def _windows(reader: _Reader, num_layers: int, window: Any, first_windowed: Any) -> tuple[int, ...]:
    """Each layer's sliding window: of the layers from `first_windowed` on, or as `layer_types` lists them."""
    if not isinstance(window, int) or window < 0 or not isinstance(first_windowed, int):
        raise ModelError(f"config.json: sliding_window = {window!r} from layer {first_windowed!r}: expected integers")
    known = {"full_attention": 0} | ({"sliding_attention": window} if window else {})
    kinds = ["sliding_attention" if window and i >= first_windowed else "full_attention" for i in range(num_layers)]
    kinds = reader.get("layer_types", kinds)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(f"config.json: layer_types = {kinds!r}: expected {num_layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)
