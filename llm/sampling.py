"""Sampling parameters as scripts write them: the router's own, unchecked ones, with the types looked at.

They stay what `router.api.RawSampling` has, whatever that is: what a field means, its limits and its default are the
router's, so that a script gets what a served request gets.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from kvrelay.engine.errors import InvalidArgument
from kvrelay.router.api import RawSampling

# Over the wire a type is settled by the message; here anybody may pass anything, numpy's numbers too. bool is an int.
_KINDS: dict[type, type] = {int: Integral, float: Real}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(RawSampling):
    """How tokens are chosen and when an output ends. What is not given has the served default: temperature 1, as many
    tokens as the context allows, a seed that is drawn.

    `stop` and `bad_words` may be one string each. Ranges are checked when a request is made of it.
    Raises: InvalidArgument for a value of the wrong type.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(RawSampling)
        for field in fields(self):
            name, hint = field.name, hints[field.name]
            value, kinds = getattr(self, name), [kind for kind in get_args(hint) if kind is not NoneType]
            if isinstance(hint, UnionType) and len(kinds) == 1 and kinds[0] in (int, float, bool, str):
                checked = None if value is None else _scalar(name, value, kinds[0])
            elif hint in (Sequence[str], Sequence[int]):
                checked = _several(name, value, kinds[0])
            elif hint == Mapping[int, float]:
                checked = _numbers(name, value)
            else:
                continue  # the router's to check
            object.__setattr__(self, name, checked)


def _scalar(name: str, value: Any, kind: type) -> Any:
    expected = _KINDS.get(kind, kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and kind is not bool):
        raise InvalidArgument(name, value, f"must be of type {kind.__name__}")
    return kind(value)


def _several(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(value, str) and kind is str:
        return (value,)
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(name, value, f"must be a list of type {kind.__name__}")
    return tuple(_scalar(f"{name}[{i}]", item, kind) for i, item in enumerate(value))


def _numbers(name: str, value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, value, "must be a mapping of token ids to numbers")
    return {
        _scalar(name, token_id, int): _scalar(f"{name}[{token_id}]", bias, float) for token_id, bias in value.items()
    }
