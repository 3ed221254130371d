"""What a node says to its routers and of itself, before it becomes protobuf."""

from dataclasses import dataclass, field

from kvrelay.connector.base import ConnectorStatistics
from kvrelay.engine.block_pool import BlockCounts
from kvrelay.engine.legs import Leg, Load, TraceContext
from kvrelay.engine.metrics import BATCH_SIZES, STEP_SECONDS, HistogramSnapshot, empty_histogram
from kvrelay.engine.request import Matcher, Request
from kvrelay.engine.swap_space import SwapStatistics


@dataclass(frozen=True, slots=True)
class Start:
    """A router asks for one leg of one request. `peer_epoch` is the other node of the hand-off, if there is one.

    `matcher`: of its structured output, if it asks for one.
    """

    leg: Leg
    request: Request
    peer_epoch: str = ""
    matcher: Matcher | None = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A node's statistics at one moment between two steps."""

    blocks: BlockCounts
    load: Load
    transfers: ConnectorStatistics
    is_healthy: bool = True
    num_live: int = 0  # legs and transfers that have not ended
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    swap: SwapStatistics = field(default_factory=SwapStatistics)
    num_remote: int = 0  # granted, their KV on its way
    num_expected: int = 0  # called for, and not offered yet
    num_tokens: int = 0  # computed
    num_sampled: int = 0
    num_starts: int = 0  # legs asked for
    num_cancels: int = 0  # of legs, or of choices, that were there
    num_errors: int = 0  # legs that an error ended
    step_seconds: HistogramSnapshot = field(default_factory=lambda: empty_histogram(STEP_SECONDS))
    batch_sizes: HistogramSnapshot = field(default_factory=lambda: empty_histogram(BATCH_SIZES))
