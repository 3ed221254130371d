"""One request on a decode node, from the router's call to its last token.

The life of a leg here: EXPECTED (the router has called) -> QUEUED (P has offered; it stands in line with this node's
own prompts) -> GRANTED (a transfer owns its blocks and fills them) -> LOCAL (landed: it decodes). A whole leg is LOCAL
from the start. Whatever ends it on the way, its blocks come back once no write can reach them.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from kvrelay.engine.legs import HandoffReport
from kvrelay.engine.request import OutputToken, RequestKey, Sequence


class Stage(Enum):
    """Who has a leg in hand."""

    EXPECTED = auto()  # the connector; no blocks
    QUEUED = auto()  # the scheduler's queue; no blocks
    GRANTED = auto()  # the transfer, which owns the blocks
    LOCAL = auto()  # the scheduler
    OVER = auto()  # nobody wants it; kept until the connector has said its last word


@dataclass(slots=True, eq=False)
class Choice:
    """One choice that has its first token. `sequence` is None where that was its last."""

    sequence: Sequence | None
    num_said: int  # output tokens that the router knows
    unsaid: list[OutputToken]


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """One request on this node."""

    sequence: Sequence  # stands for all choices until they have their first tokens
    stage: Stage
    offered_at: float = 0.0
    granted_at: float = 0.0
    landed_at: float = 0.0
    num_missing_blocks: int = 0
    num_cached_blocks: int = 0
    owns_grant: bool = False  # the transfer still holds what was granted
    handoff: HandoffReport | None = None
    choices: dict[int, Choice] = field(default_factory=dict)  # that have begun, and not ended
    unwanted: set[int] = field(default_factory=set)  # cancelled one by one before they began
    is_reported: bool = False

    @property
    def key(self) -> RequestKey:
        return self.sequence.key

    @property
    def sequences(self) -> list[Sequence]:
        """What the scheduler has of it."""
        if not self.choices:
            return [self.sequence]
        return [choice.sequence for choice in self.choices.values() if choice.sequence is not None]
