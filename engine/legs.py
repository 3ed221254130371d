"""The words in which routers and nodes speak of legs, load and caches; the wire's messages become these at both ends.

Standard library only.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.request import FinishReason, Logprobs, RequestKey

# What a node takes from a router at most, whatever the router's own limits are.
MAX_CHOICES = 128
MAX_LOGPROBS = 64


class Leg(StrEnum):
    """Which part of the race a node is asked to run."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context, handed on to the nodes."""

    traceparent: str
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode node that a prefill node is to keep a session with."""

    epoch: str
    connector_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """One hand-off as the decode node saw it."""

    kv_bytes: int
    kv_blocks: int
    cached_blocks: int
    grant_ms: float  # offer seen -> granted
    transfer_ms: float  # granted -> landed
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReport:
    """How a leg came to its first own token."""

    queue_ms: float = 0.0
    compute_ms: float = 0.0
    num_cached_tokens: int = 0
    handoff: HandoffReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one choice of one leg, log-probabilities of its prompt, or the leg's end."""

    key: RequestKey
    choice: int = 0
    first_token_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[Logprobs, ...] = ()  # one a prompt token, in order, before the first output token
    first_prompt_index: int = 0
    finish_reason: FinishReason | None = None
    error: KvrelayError | None = None
    report: LegReport | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a node says it is."""

    num_free_blocks: int = 0  # free or only cached
    num_wanted_blocks: int = 0  # what those that wait will take when they start
    num_running: int = 0  # choices (on prefill nodes: prompts) that hold a place here, those in transfer too
    num_waiting: int = 0  # those without one yet: in the queue, or called for and not offered yet
    num_waiting_tokens: int = 0  # tokens that this node is to compute and has not yet
    tokens_per_s: float = 0.0  # how fast it has computed lately, pauses left out; 0: unknown
    sessions: frozenset[str] = frozenset()  # prefill nodes: epochs of the decode nodes they can push to


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """What can be found in a node's prefix cache since the last change, by short names (`engine/block_hash.py`)."""

    from_nothing: bool = False  # nothing else can be found any more
    evicted: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()

    def apply_to(self, names: set[int]) -> None:
        """Bring the names that could be found before up to date."""
        if self.from_nothing:
            names.clear()
        names -= self.evicted
        names |= self.stored
