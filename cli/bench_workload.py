"""What a load consists of: lengths, prompts and arrivals, all drawn from a seed. Pure.

Request i of a workload is the same whenever and in whatever order it is asked for, so that a closed loop, an open loop
and two servers that are compared get the same prompts.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvrelay.cli.bench_files import HASHED_BLOCK, TracedRequest
from kvrelay.engine.errors import ConfigError

_FORMS = "expected N, uniform:LOW:HIGH or lognormal:MEAN:CV"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens: `low` is also the fixed number, and the lognormal's mean."""

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int = 0  # of uniform, inclusive
    cv: float = 0.0  # of lognormal: standard deviation / mean

    @property
    def most(self) -> int:
        """The largest that can be drawn; of a lognormal, which has no largest, 1."""
        return {"fixed": self.low, "uniform": self.high, "lognormal": 1}[self.kind]

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return rng.randint(self.low, self.high)
        variance = math.log(1 + self.cv**2)  # of the logarithm
        drawn = rng.lognormvariate(math.log(self.low) - variance / 2, math.sqrt(variance))
        return max(1, round(min(drawn, 1e9)))


def parse_lengths(name: str, text: str) -> Lengths:
    """Lengths of "512", "uniform:256:768" or "lognormal:512:0.5".

    Raises: ConfigError that begins with `name`.
    """
    kind, *values = text.split(":") if ":" in text else ("fixed", text)
    try:
        if kind == "fixed" and len(values) == 1:
            lengths = Lengths("fixed", int(values[0]))
        elif kind == "uniform" and len(values) == 2:
            lengths = Lengths("uniform", int(values[0]), high=int(values[1]))
        elif kind == "lognormal" and len(values) == 2:
            lengths = Lengths("lognormal", int(values[0]), cv=float(values[1]))
        else:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: {_FORMS}") from None
    if lengths.low < 1 or (kind == "uniform" and lengths.high < lengths.low):
        raise ConfigError(f"{name} = {text!r}: lengths must be at least 1, and LOW no more than HIGH")
    if not 0 <= lengths.cv <= 10:
        raise ConfigError(f"{name} = {text!r}: CV must be in [0, 10]")
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to send."""

    index: int
    token_ids: tuple[int, ...]
    max_tokens: int


class PromptSource(Protocol):
    """What a load asks for."""

    @property
    def num_prompts(self) -> int | None:
        """How many it has; None: any number."""

    def prompt(self, index: int) -> Prompt:
        """Request number `index`; negative ones are those of the warm-up."""


class Workload:
    """Prompts by index: one of the shared prefixes, then tokens of their own."""

    def __init__(
        self,
        *,
        seed: int,
        vocabulary: Sequence[int],
        max_model_len: int,
        input_lengths: Lengths,
        output_lengths: Lengths,
        num_prefixes: int = 1,
        prefix_len: int = 0,
    ) -> None:
        """`vocabulary`: the ids to draw from. Input lengths count the tokens behind the prefix. What a lognormal draws
        beyond the context is cut to it: the prompt so that one token can be generated, then the output.

        Raises: ConfigError if fixed or uniform lengths do not fit into the context.
        """
        most = prefix_len + input_lengths.most + output_lengths.most
        if most > max_model_len:
            raise ConfigError(f"up to {most} tokens in and out: the model's context has {max_model_len}")
        self._seed = seed
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._input_lengths = input_lengths
        self._output_lengths = output_lengths
        self._prefixes = [
            tuple(random.Random(f"{seed}/prefix/{i}").choices(vocabulary, k=prefix_len)) for i in range(num_prefixes)
        ]

    @property
    def num_prompts(self) -> int | None:
        return None

    def prompt(self, index: int) -> Prompt:
        """Request number `index`; negative ones are those of the warm-up."""
        rng = random.Random(f"{self._seed}/request/{index}")
        num_input, num_output = self._input_lengths.draw(rng), self._output_lengths.draw(rng)
        prefix = rng.choice(self._prefixes)
        room = self._max_model_len - len(prefix)
        num_input = min(num_input, room - 1)
        own = rng.choices(self._vocabulary, k=num_input)
        return Prompt(index=index, token_ids=(*prefix, *own), max_tokens=min(num_output, room - num_input))


class ListedPrompts:
    """Prompts that stand in a list, so many tokens to generate for each."""

    def __init__(self, listed: Sequence[tuple[tuple[int, ...], int]], *, seed: int, vocabulary: Sequence[int]) -> None:
        self._listed = listed
        self._seed = seed
        self._vocabulary = vocabulary

    @property
    def num_prompts(self) -> int | None:
        return len(self._listed)

    def prompt(self, index: int) -> Prompt:
        """A warm-up's has the length of one that is listed, and tokens of its own."""
        token_ids, max_tokens = self._listed[index % len(self._listed)]
        if index < 0:
            token_ids = _random_tokens(f"{self._seed}/request/{index}", self._vocabulary, len(token_ids))
        return Prompt(index=index, token_ids=token_ids, max_tokens=max_tokens)


class TracedPrompts:
    """Prompts as long as a trace's; the tokens are random, and equal where the trace says that they are."""

    def __init__(self, requests: Sequence[TracedRequest], *, seed: int, vocabulary: Sequence[int]) -> None:
        self._requests = requests
        self._seed = seed
        self._vocabulary = vocabulary

    @property
    def num_prompts(self) -> int | None:
        return len(self._requests)

    def prompt(self, index: int) -> Prompt:
        traced = self._requests[index % len(self._requests)]
        if index < 0 or not traced.hash_ids:
            own = f"{self._seed}/request/{index}"
            token_ids = _random_tokens(own, self._vocabulary, traced.num_input_tokens)
        else:
            blocks = [
                _random_tokens(f"{self._seed}/block/{hash_id}", self._vocabulary, HASHED_BLOCK)
                for hash_id in traced.hash_ids
            ]
            token_ids = tuple(itertools.chain.from_iterable(blocks))[: traced.num_input_tokens]
        return Prompt(index=index, token_ids=token_ids, max_tokens=traced.num_output_tokens)


def _random_tokens(seed: str, vocabulary: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(vocabulary, k=num_tokens))


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start of each arrival, without end: a Poisson process of `rate` a second."""
    rng = random.Random(f"{seed}/arrivals")
    moment = 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment
