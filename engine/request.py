"""What a request is: as validated (frozen, travels between nodes) and as it runs (one `Sequence` a choice).

Standard library only: the router imports this too. What decides about requests is the scheduler; this file holds
their facts and the rules by which a sequence stops.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol


class RequestKey(NamedTuple):
    """One try at one request: the name of everything that belongs to it, on every node."""

    request_id: str
    attempt: int


class FinishReason(StrEnum):
    """Why a choice ended; the APIs' words, but for the last."""

    STOP = "stop"  # by a token that is no text: EOS, or a stop id
    LENGTH = "length"
    COMPLETE = "complete"  # its form has no more to come; nodes and router say so, and clients hear "stop"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one position, under the model's own distribution, before any sampling
    parameter: of the token that stands there, then of the likeliest ones, likeliest first. All are finite, and float32.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One sampled token of one choice, and the choice's end, if it is that."""

    choice: int
    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class StructuredKind(StrEnum):
    """In which language the form of a structured output is written."""

    JSON_OBJECT = "json_object"  # any object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # Lark, in llguidance's dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form that the whole of an output is to have."""

    kind: StructuredKind
    specification: str = ""  # of JSON_SCHEMA, REGEX and GRAMMAR
    choices: tuple[str, ...] = ()  # of CHOICE

    @classmethod
    def json_object(cls) -> "StructuredOutput":
        """Any JSON object."""
        return cls(kind=StructuredKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, object]) -> "StructuredOutput":
        """JSON with this schema, an object or one as text. Its properties' order is the output's."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        return cls(kind=StructuredKind.JSON_SCHEMA, specification=text)

    @classmethod
    def regex(cls, pattern: str) -> "StructuredOutput":
        """Text that matches as a whole, in the syntax of Rust's regex crate."""
        return cls(kind=StructuredKind.REGEX, specification=pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> "StructuredOutput":
        """One of these texts."""
        return cls(kind=StructuredKind.CHOICE, choices=tuple(choices))

    @classmethod
    def grammar(cls, lark: str) -> "StructuredOutput":
        """Text of this grammar, from its rule `start`."""
        return cls(kind=StructuredKind.GRAMMAR, specification=lark)


class Matcher(Protocol):
    """How far one choice's output has come in its form (`engine/structured_output.py`). Says nothing that the form and
    the output's tokens do not: it catches up with those that were sampled elsewhere, or before."""

    def fork(self) -> "Matcher":
        """Another one, for another choice with the same output so far."""

    def allowed(self, output_ids: Seq[int]) -> bytes:
        """The tokens that may come after this output: bit i % 8 of byte i // 8 is token i's.

        Raises: Internal, for this choice alone.
        """

    def completes(self, output_ids: Seq[int], token_id: int) -> bool:
        """Whether the output is complete with this token, one that was allowed: nothing can follow.

        Raises: Internal, for this choice alone.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a choice ends. Validated at the router's edge, where `max_tokens` and `seed`
    get their values if the client gave none."""

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to logits before a token is chosen by them."""
        return bool(self.logit_bias or self.bad_word_ids or self.min_tokens or self.penalises)

    @property
    def penalises(self) -> bool:
        """Whether a token's score depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request, as the router made it and as every node sees it."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()  # of a resumed choice: its output so far
    choice: int = 0  # of a resumed choice: which one it is
    priority: int = 0  # lower runs first; see engine/ranking.py
    arrival: float = 0.0  # this process's clock: when it came in
    deadline: float = float("inf")  # this process's clock
    cache_salt: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV a prefill computes: the prompt, and a resumed request's output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Status(Enum):
    """Where a sequence is. The scheduler alone moves it."""

    WAITING = auto()  # in the queue, owns no blocks
    REMOTE = auto()  # granted: a transfer owns its blocks and fills them
    RUNNING = auto()
    SWAPPED = auto()  # gave way: its KV lies in host memory, and it owns no blocks
    FINISHED = auto()  # owns no blocks


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request as it runs: its tokens, its blocks, how far it is computed.

    num_computed_tokens catches up with num_tokens; what is between them is what a step may compute. A sequence
    whose prompt is computed has exactly one token to go: the one sampled last.
    """

    request: Request
    choice: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it first started
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities are known, or not asked for: from the first on
    block_table: list[int] = field(default_factory=list)  # pool block of tokens [i*B, (i+1)*B)
    block_hashes: list[bytes] = field(default_factory=list)  # of each full block of token_ids
    host_block_ids: tuple[int, ...] = ()  # while SWAPPED: host block of tokens [i*B, (i+1)*B), as far as computed
    matcher: Matcher | None = None  # where its output is to have a form
    status: Status = Status.WAITING
    awaits_kv: bool = False  # another node is to fill its blocks; False again once they have landed
    num_preemptions: int = 0
    first_scheduled_at: float | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
            self.choice = self.request.choice
        if self.request.sampling.prompt_logprobs is None:
            self.num_prompt_logprobs = self.num_prompt_tokens

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens of its output so far."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_choices(self) -> int:
        """How many choices, from `choice` on, it stands for: all of its request's, until each has its first token."""
        return self.request.sampling.n if self.num_tokens == self.request.num_tokens else 1

    @property
    def choices(self) -> range:
        """The choices that it stands for."""
        return range(self.choice, self.choice + self.num_choices)


def finish_reason(
    sampling: SamplingParams, num_output_tokens: int, token_id: int, eos_token_ids: Container[int]
) -> FinishReason | None:
    """Why a choice ends with `token_id`, output token number `num_output_tokens` (from 1); None if it goes on.

    Explicit stop ids count even where EOS is ignored; below min_tokens neither does.
    """
    if num_output_tokens >= sampling.min_tokens and (
        token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids)
    ):
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
