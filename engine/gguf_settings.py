"""A GGUF file's settings of its architecture, `llama.block_count` and the like; those that nobody reads are refused.

Ignoring a setting would convert and then answer nonsense: experts, another attention, a scaling of positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Value

# Read by no part of the forward pass.
_IRRELEVANT = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})


class Settings:
    """Reads settings and remembers which. Its methods raise ModelError, naming the key."""

    def __init__(self, name: str, architecture: str, metadata: Mapping[str, Value]) -> None:
        """`name`: the file's, for errors."""
        prefix = f"{architecture}."
        self._name = name
        self._prefix = prefix
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A count, at least 1."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """More than 0."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, "expected a positive number")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """None where the key is absent or 0."""
        return self.number(key) if self.get(key) else None

    def flags(self, key: str, count: int) -> Sequence[bool] | None:
        """None where the key is absent or no array."""
        values = self.get(key)
        if not isinstance(values, list):
            return None
        if len(values) != count:
            raise self.error(key, f"expected {count} values")
        return [bool(value) for value in values]

    def expect(self, key: str, *values: Any) -> None:
        """A key that may be absent, or have one of these values."""
        if self.get(key, values[0]) not in values:
            raise self.error(key, f"only {', '.join(map(repr, values))} is supported")

    def refuse_unread(self) -> None:
        """Raises: ModelError for a setting that is switched on and that nobody has looked at."""
        for key, value in self._values.items():
            if value and key not in self._read and key not in _IRRELEVANT:
                raise self.error(key, "not supported")

    def error(self, key: str, problem: str) -> ModelError:
        shown = repr(self._values.get(key))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ModelError(f"{self._name}: {self._prefix}{key} = {shown}: {problem}")
