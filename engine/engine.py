"""The engine: plan a step, run it, take its tokens in. Knows no network, no thread and no role.

One step: scheduler.plan() -> scheduler.apply() -> executor.execute() -> scheduler.advance() -> tokens in, ends found.
A row that fails ends its own sequence; a step that fails as a whole ends the sequences in it, and no other.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import DeadlineExceeded, Internal, KvrelayError
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import FinishReason, Sequence, finish_reason
from kvrelay.engine.scheduler import Scheduler, StepPlan
from kvrelay.engine.step import Executor, RowResult, Scheduled

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one step did for one sequence. A finish reason or an error is its end: it owns no blocks any more."""

    sequence: Sequence
    start: int  # tokens [start, end) were computed
    end: int
    token_id: int | None = None  # sampled, and appended to the sequence
    finish_reason: FinishReason | None = None
    error: KvrelayError | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step's plan and what came of it. `outputs` is empty where there was nothing to compute."""

    plan: StepPlan
    outputs: tuple[RowOutput, ...] = ()
    duration_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.outputs)


class Engine:
    """Runs steps over one scheduler and one executor. Owned by one thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor, eos_token_ids: Seq[int], clock: Clock) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.num_steps = 0

    def plan(self) -> tuple[StepPlan, tuple[Scheduled, ...]]:
        """Decide what the next step does, and reserve what it needs. `execute` must follow."""
        plan = self.scheduler.plan()
        scheduled = self.scheduler.apply(plan)
        now = self._clock.now()
        for item in scheduled:
            if item.sequence.first_scheduled_at is None:
                item.sequence.first_scheduled_at = now
        return plan, scheduled

    def execute(self, plan: StepPlan, scheduled: tuple[Scheduled, ...]) -> StepOutcome:
        """Compute what was planned."""
        if not scheduled:
            return StepOutcome(plan)
        started_at = self._clock.now()
        results = self._run(scheduled)
        rows = zip(scheduled, results, strict=True)
        self.scheduler.advance(item for item, result in rows if not isinstance(result, KvrelayError))
        outputs = tuple(self._take(item, result) for item, result in zip(scheduled, results, strict=True))
        self.num_steps += 1
        return StepOutcome(plan, outputs, self._clock.now() - started_at)

    def expired(self, sequences: Seq[Sequence]) -> list[tuple[Sequence, KvrelayError]]:
        """Those whose deadline has passed, with the error to say so."""
        now = self._clock.now()
        return [
            (sequence, DeadlineExceeded(f"deadline passed after {sequence.num_output_tokens} output tokens"))
            for sequence in sequences
            if sequence.request.deadline <= now
        ]

    def _run(self, scheduled: tuple[Scheduled, ...]) -> list[RowResult]:
        try:
            return self.executor.execute(scheduled)
        except Exception as error:  # the root of a step: it fails these sequences, and the engine goes on
            log.exception("step_failed", extra=fields(num_sequences=len(scheduled)))
            return [Internal(f"a step failed: {error}")] * len(scheduled)

    def _take(self, item: Scheduled, result: RowResult) -> RowOutput:
        sequence = item.sequence
        if isinstance(result, KvrelayError):
            self.scheduler.abort(sequence)
            return RowOutput(sequence, item.start, item.end, error=result)
        if result is None:
            return RowOutput(sequence, item.start, item.end)
        sequence.token_ids.append(result)
        reason = finish_reason(sequence.request.sampling, sequence.num_output_tokens, result, self._eos_token_ids)
        if reason is not None:
            self.scheduler.finish(sequence)
        return RowOutput(sequence, item.start, item.end, result, reason)
