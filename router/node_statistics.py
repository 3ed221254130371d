"""What a node says of itself once a second, as the router keeps it: numbers, and names out of closed lists.

Nothing here grows with what a node says: its map's keys are looked up in these lists, what is in none counts as OTHER.
"""

from dataclasses import dataclass, field

from kvrelay.engine.metrics import (
    BATCH_SIZES,
    STEP_SECONDS,
    HistogramSnapshot,
    ProcessStatistics,
    empty_histogram,
)

OTHER = "other"
TRANSPORTS = ("inproc", "shm", "zmq", "tcp", "ucx")
# The connector's states of a transfer that lasts: connector/handoff.py, where the tables stand.
PREFILL_STATES = ("offered", "sending", "draining", "committed")
DECODE_STATES = (
    "early",
    "waiting",
    "pending",
    "granted",
    "commit_seen",
    "bytes_in",
    "stopping",
    "revoked",
    "quarantined",
)
TRANSFER_STATES = (*PREFILL_STATES, *DECODE_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStatistics:
    """KV blocks by what they are."""

    total: int = 0
    free: int = 0
    cached: int = 0  # hashed and unreferenced
    held: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficStatistics:
    """What one transport has moved: sent by a prefill node, received by a decode node."""

    num_landed: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """The connector's count."""

    states: dict[str, int] = field(default_factory=dict)  # transfers that last, by state
    transports: dict[str, TrafficStatistics] = field(default_factory=dict)
    num_sessions: dict[str, int] = field(default_factory=dict)  # open ones, by transport
    num_landed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    num_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRoom:
    """Host memory for the KV of those that gave way."""

    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_swapped: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """One report. Counters are since the node's start, under its epoch."""

    blocks: BlockStatistics = field(default_factory=BlockStatistics)
    transfers: TransferStatistics = field(default_factory=TransferStatistics)
    swap: SwapRoom = field(default_factory=SwapRoom)
    num_remote: int = 0
    num_expected: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_starts: int = 0
    num_cancels: int = 0
    num_errors: int = 0
    is_healthy: bool = True
    step_seconds: HistogramSnapshot = field(default_factory=lambda: empty_histogram(STEP_SECONDS))
    batch_sizes: HistogramSnapshot = field(default_factory=lambda: empty_histogram(BATCH_SIZES))
    process: ProcessStatistics = field(default_factory=ProcessStatistics)

    @property
    def num_recomputed(self) -> int:
        """Preemptions whose KV was given up. One whose swap failed counts as a swap."""
        return max(0, self.num_preemptions - self.swap.num_swapped_out)
