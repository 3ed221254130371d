"""Reads a Hugging Face config.json setting by setting, and refuses by name what nobody has read.

Ignoring a setting would load and then answer nonsense, so nothing is guessed: not a type, not a range, not a meaning.
"""

from collections.abc import Mapping
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import shown
from kvrelay.engine.models.options import Activation

HfConfig = Mapping[str, Any]

# Read by no part of the forward pass: names, token ids, training and generation settings. So is what begins with "_".
_IRRELEVANT = frozenset(
    """architectures model_type torch_dtype dtype transformers_version transformers.js_config unsloth_version
    unsloth_fixed auto_map use_cache cache_implementation initializer_range pretraining_tp is_llama_config
    attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop embd_pdrop
    bos_token_id eos_token_id pad_token_id unk_token_id eod_token_id max_window_layers model_max_length return_dict
    output_hidden_states output_attentions chunk_size_feed_forward problem_type id2label label2id""".split()  # noqa: SIM905 - one a line is no clearer
)
# Must be what the decoder does; anything else is another model.
_REQUIRED = {
    "is_decoder": (True, False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
_MOST = 2**40  # of what is counted
_TINY, _HUGE = 1e-30, 1e30  # of other numbers, so that what is computed from a few of them is finite
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


class ConfigReader:
    """Reads settings and remembers which. Its methods raise ModelError, naming the setting, if it is not plausible."""

    def __init__(self, hf: HfConfig, path: str = "config.json: ") -> None:
        """`path`: stands before the settings' names in errors."""
        self._hf = hf
        self._path = path
        self._assumed: dict[str, Any] = {}
        self._read: set[str] = set()

    def assume(self, **settings: Any) -> None:
        """What settings are where they are absent. One that is null is not."""
        self._assumed.update(settings)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting as it stands; `default` where it is null, or absent and nothing is assumed."""
        self._read.add(name)
        value = self._value(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(name, f"expected an integer from 1 to {most}")
        return value

    def size_or_none(self, name: str) -> int:
        """Null: 0, which stands for none."""
        return 0 if self.get(name) is None else self.size(name)

    def number_or_none(self, name: str) -> float:
        """Null: 0, which stands for none."""
        return 0.0 if self.get(name) is None else self.number(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not _is_positive(value):
            raise self.error(name, "expected a positive number")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.get(name)
        if not isinstance(values, list) or len(values) != count or not all(map(_is_positive, values)):
            raise self.error(name, f"expected {count} positive numbers")
        return tuple(map(float, values))

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "expected true or false")
        return value

    def activation(self, name: str) -> Activation:
        value = self.get(name)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error(name, f"expected one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def object(self, name: str) -> dict[str, Any]:
        """An object; empty where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "expected an object")
        return value

    def expect(self, name: str, *values: Any) -> None:
        """A setting that may be absent, or one of these values."""
        if self.get(name, values[0]) not in values:
            raise self.error(name, f"only {values[0]!r} is supported")

    def refuse_unread(self) -> None:
        """Raises: ModelError for a setting that is switched on and that nobody has looked at."""
        for name, value in self._hf.items():
            if name in self._read or name in _IRRELEVANT or name.startswith("_"):
                continue
            if value not in _REQUIRED[name] if name in _REQUIRED else value:
                raise self.error(name, "not supported")

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._path}{name} = {shown(self._value(name))}: {problem}")

    def _value(self, name: str) -> Any:
        return self._hf[name] if name in self._hf else self._assumed.get(name)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _TINY <= value <= _HUGE
