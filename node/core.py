"""What both nodes do on the engine thread: take messages in, serve the connector's events, step, say what came of it.

One turn of the loop is messages -> connector events -> one step -> report. Everything here and in the two nodes runs
on the engine thread alone and needs no lock; `on_report` is the way out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from kvrelay.connector.base import ConnectorStatistics
from kvrelay.engine.clock import Clock
from kvrelay.engine.engine import Engine, RowOutput, StepOutcome
from kvrelay.engine.errors import Internal, KvrelayError, ResourceExhausted
from kvrelay.engine.legs import CacheChange, Delta, Load, Peer
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.metrics import BATCH_SIZES, STEP_SECONDS, Histogram
from kvrelay.engine.request import RequestKey, Sequence
from kvrelay.node.found_blocks import take_change
from kvrelay.node.report import Snapshot, Start

log = get_logger(__name__)

OnReport = Callable[[tuple[Delta, ...], Snapshot, CacheChange | None], None]

_MAX_POSITIONS = 512  # of a prompt, whose log-probabilities are said in one delta
_RATE_MEMORY = 0.7  # what the steps before count in the measured rate, beside one more
MAX_LEGS = 16_384  # that wait or run here, of all routers: each holds its prompt's token ids


class NodeCore(ABC):
    """One node's state between its inbox and its reports."""

    def __init__(self, engine: Engine, clock: Clock, on_report: OnReport) -> None:
        self.engine = engine
        self.clock = clock
        self.is_healthy = True  # whether it can serve at all
        self._on_report = on_report
        self._deltas: list[Delta] = []
        self._num_lately = 0.0  # tokens computed in the last steps, the older ones counting less, and in what time
        self._lately_s = 0.0
        self._last: Snapshot | None = None
        self._step_seconds = Histogram(STEP_SECONDS)
        self._batch_sizes = Histogram(BATCH_SIZES)
        self._num_tokens = 0
        self._num_sampled = 0
        self._num_starts = 0
        self._num_cancels = 0
        self._num_errors = 0

    # --- messages, each served between two steps

    def start(self, start: Start) -> None:
        """Begin a leg; whatever is wrong with it ends this leg and no other."""
        key = start.request.key
        self._num_starts += 1
        try:
            if self._num_live() >= MAX_LEGS:
                raise ResourceExhausted(f"{MAX_LEGS} requests wait or run on this node already")
            if (start.matcher is None) != (start.request.sampling.structured_output is None):
                raise Internal("a structured output and what it is matched by come together")
            self._start(start)
        except KvrelayError as error:
            self._say(Delta(key=key, error=error, ended=True))
        except Exception as error:  # the root of a request: it fails this one
            log.exception("start_failed", extra=fields(request_id=key.request_id, attempt=key.attempt))
            self._say(Delta(key=key, error=Internal(f"start failed: {error}"), ended=True))

    def cancel(self, key: RequestKey, choice: int | None = None) -> None:
        """Nobody wants this leg, or this choice of it, any more. Unknown ones are ignored; nothing is said back."""
        self._num_cancels += self._cancel(key, choice)

    @abstractmethod
    def set_peers(self, peers: Iterable[Peer]) -> None:
        """The decode nodes there are now."""

    # --- the loop's turn

    def turn(self) -> float | None:
        """Serve events, run a step, report.

        Returns: seconds until the next turn is due: 0 for at once, None for when something happens.
        """
        self._serve_events()
        self._expire()
        progressed = self._step()
        self._flush()
        if progressed:
            return 0.0
        deadline = min((d for d in self._deadlines()), default=float("inf"))
        return None if deadline == float("inf") else max(0.0, deadline - self.clock.now())

    @abstractmethod
    def close(self) -> None:
        """Stop the connector. Nothing moves afterwards."""

    # --- what the roles fill in

    @abstractmethod
    def _start(self, start: Start) -> None: ...

    @abstractmethod
    def _cancel(self, key: RequestKey, choice: int | None) -> bool:
        """Returns: whether there was anything to cancel."""

    @abstractmethod
    def _serve_events(self) -> None: ...

    @abstractmethod
    def _expire(self) -> None: ...

    @abstractmethod
    def _step(self) -> bool:
        """One step; whether there was anything to do."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float]:
        """Deadlines that the engine itself must watch while it waits."""

    @abstractmethod
    def _num_live(self) -> int: ...

    @abstractmethod
    def _waiting(self) -> Iterable[Sequence]:
        """What has no place in a batch and no blocks yet."""

    @abstractmethod
    def _num_waiting_tokens(self) -> int:
        """Tokens that this node is to compute and has not yet."""

    @abstractmethod
    def transfer_statistics(self) -> ConnectorStatistics:
        """The connector's own count. Any thread."""

    # --- shared

    def _say(self, delta: Delta) -> None:
        self._num_errors += delta.error is not None
        self._deltas.append(delta)

    def _say_prompt_logprobs(self, row: RowOutput) -> None:
        for start in range(0, len(row.prompt_logprobs), _MAX_POSITIONS):
            self._say(
                Delta(
                    key=row.sequence.key,
                    prompt_logprobs=row.prompt_logprobs[start : start + _MAX_POSITIONS],
                    first_prompt_index=row.first_prompt_index + start,
                )
            )

    def _measure(self, outcome: StepOutcome) -> None:
        """Count a step, and how fast it was: tokens over time, not a mean of rates, as a prompt's short last chunk may
        not make a node look slow. Only time in steps counts, so it says how fast the node is, however long it has
        had nothing to do."""
        if not outcome.outputs:
            return
        num_tokens = outcome.num_tokens
        self._num_tokens += num_tokens
        self._num_sampled += sum(len(row.tokens) for row in outcome.outputs)
        self._step_seconds.observe(outcome.duration_s)
        self._batch_sizes.observe(len(outcome.outputs))
        if outcome.duration_s > 0:
            self._num_lately = _RATE_MEMORY * self._num_lately + num_tokens
            self._lately_s = _RATE_MEMORY * self._lately_s + outcome.duration_s

    def _flush(self) -> None:
        """Say what this turn brought, how things stand, and what the prefix cache holds, if any of it is news."""
        snapshot, change = self.snapshot(), take_change(self.engine.scheduler.pool)
        if self._deltas or change is not None or snapshot != self._last:
            deltas, self._deltas = tuple(self._deltas), []
            self._last = snapshot
            self._on_report(deltas, snapshot, change)

    def snapshot(self) -> Snapshot:
        """The node's statistics now."""
        scheduler = self.engine.scheduler
        admission, waiting = scheduler.admission, tuple(self._waiting())
        statistics = scheduler.statistics()
        transfers = self.transfer_statistics()
        blocks = scheduler.pool.counts()
        return Snapshot(
            blocks=blocks,
            load=Load(
                num_free_blocks=blocks.free + blocks.cached,
                num_wanted_blocks=sum(admission.terms(sequence).num_blocks for sequence in waiting),
                num_running=sum(map(admission.num_seats, scheduler.seated())),
                num_waiting=sum(map(admission.num_seats, waiting)),
                num_waiting_tokens=self._num_waiting_tokens(),
                tokens_per_s=self._num_lately / self._lately_s if self._lately_s else 0.0,
                sessions=frozenset(transfers.sessions),
            ),
            transfers=transfers,
            is_healthy=self.is_healthy,
            num_live=self._num_live(),
            num_steps=self.engine.num_steps,
            num_preemptions=statistics.num_preemptions,
            num_prefix_queries=statistics.num_prefix_queries,
            num_prefix_hits=statistics.num_prefix_hits,
            swap=statistics.swap,
            num_remote=statistics.num_remote,
            num_expected=statistics.num_expected,
            num_tokens=self._num_tokens,
            num_sampled=self._num_sampled,
            num_starts=self._num_starts,
            num_cancels=self._num_cancels,
            num_errors=self._num_errors,
            step_seconds=self._step_seconds.snapshot(),
            batch_sizes=self._batch_sizes.snapshot(),
        )
