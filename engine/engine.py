"""The engine: plan a step, run it, take its tokens in. Knows no network, no thread and no role.

One step: scheduler.plan() -> scheduler.apply() -> KV swapped out, then in -> executor.execute() -> scheduler.advance()
-> tokens in, ends found. A row that fails ends its own sequence; a step that fails as a whole ends the sequences in it,
and no other; a sequence whose swap fails is computed again.
"""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import DeadlineExceeded, Internal, KvrelayError
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import FinishReason, Logprobs, OutputToken, Sequence, finish_reason
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.step import Applied, Executor, RowResult, Sampled, Scheduled, Swap

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one step did for one sequence. An error is its end: it owns no blocks any more."""

    sequence: Sequence
    start: int  # tokens [start, end) were computed
    end: int
    tokens: tuple[OutputToken, ...] = ()  # sampled: one a choice that the sequence stood for
    going_on: tuple[Sequence, ...] = ()  # one for each of the tokens that is no end
    prompt_logprobs: tuple[Logprobs, ...] = ()
    first_prompt_index: int = 0
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

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        eos_token_ids: Seq[int],
        clock: Clock,
        *,
        hands_over: bool = False,
    ) -> None:
        """`hands_over`: a sequence ends here with its first tokens, whatever they are."""
        self.scheduler = scheduler
        self.executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._hands_over = hands_over
        self.num_steps = 0

    def plan(self) -> tuple[StepPlan, tuple[Scheduled, ...]]:
        """Decide what the next step does, reserve what it needs, and swap. `execute` must follow.

        Whoever is told of blocks after this, another node that fills them included, may write there at once.
        """
        plan = self.scheduler.plan()
        scheduled = self._swap(self.scheduler.apply(plan))
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

    def go_on(self, sequence: Sequence, tokens: Seq[OutputToken]) -> tuple[Sequence, ...]:
        """Append to a running sequence what was sampled behind its last token: one token, or the first tokens of the
        choices that it stands for, all or some.

        Returns: the sequences that go on, one for each token that is no end.
        """
        going_on = [token for token in tokens if token.finish_reason is None]
        if sequence.num_choices > 1 and going_on:
            sequences, copies = self.scheduler.fork(sequence, going_on)
            self.executor.copy_blocks(copies)
            return tuple(sequences)
        sequence.token_ids.append(tokens[0].token_id)
        if going_on:
            return (sequence,)
        self.scheduler.finish(sequence)
        return ()

    def expired(self, sequences: Seq[Sequence]) -> list[tuple[Sequence, KvrelayError]]:
        """Those whose deadline has passed, with the error to say so."""
        now = self._clock.now()
        return [
            (sequence, DeadlineExceeded(f"deadline passed after {sequence.num_output_tokens} output tokens"))
            for sequence in sequences
            if sequence.request.deadline <= now
        ]

    def _swap(self, applied: Applied) -> tuple[Scheduled, ...]:
        """Copy KV to host memory, then back. Returns: what is to be computed; not where the KV did not come back."""
        if not applied.swap_outs and not applied.swap_ins:
            return applied.scheduled
        for swap in applied.swap_outs:
            self._copy(self.executor.swap_out, swap)
        lost = set()
        for swap in applied.swap_ins:
            if self._copy(self.executor.swap_in, swap):
                self.scheduler.restored(swap.sequence)
            else:
                lost.add(swap.sequence)
        return tuple(item for item in applied.scheduled if item.sequence not in lost)

    def _copy(self, copy: Callable[[Seq[tuple[int, int]]], None], swap: Swap) -> bool:
        """Carry one swap out, or have its sequence computed again."""
        try:
            copy(swap.copies)
        except Exception:  # the root of a swap: it fails this sequence's, and the engine goes on
            key = swap.sequence.key
            log.exception("swap_failed", extra=fields(request_id=key.request_id, attempt=key.attempt))
            self.scheduler.recompute(swap.sequence)
            return False
        return True

    def _run(self, scheduled: tuple[Scheduled, ...]) -> list[RowResult]:
        try:
            return self.executor.execute(scheduled)
        except Exception as error:  # the root of a step: it fails these sequences, and the engine goes on
            log.exception("step_failed", extra=fields(num_sequences=len(scheduled)))
            return [Internal(f"a step failed: {error}")] * len(scheduled)

    def _take(self, item: Scheduled, result: RowResult) -> RowOutput:
        sequence = item.sequence
        tokens = result if isinstance(result, KvrelayError) else self._tokens(sequence, result.sampled)
        if isinstance(tokens, KvrelayError):
            self.scheduler.abort(sequence)
            return RowOutput(sequence, item.start, item.end, error=tokens)
        assert not isinstance(result, KvrelayError)
        first_prompt_index = sequence.num_prompt_logprobs
        sequence.num_prompt_logprobs += len(result.prompt_logprobs)
        going_on: tuple[Sequence, ...] = ()
        if tokens and self._hands_over:
            self.scheduler.finish(sequence)
        elif tokens:
            going_on = self.go_on(sequence, tokens)
        return RowOutput(
            sequence,
            item.start,
            item.end,
            tokens=tokens,
            going_on=going_on,
            prompt_logprobs=result.prompt_logprobs,
            first_prompt_index=first_prompt_index,
        )

    def _tokens(self, sequence: Sequence, sampled: Seq[Sampled]) -> tuple[OutputToken, ...] | KvrelayError:
        """Returns an error and does not raise it where it is kept: that would be a cycle of references."""
        try:
            return tuple(self._token(sequence, i, token) for i, token in enumerate(sampled))
        except KvrelayError as error:
            return error

    def _token(self, sequence: Sequence, index: int, sampled: Sampled) -> OutputToken:
        """Raises: Internal where a structured output has gone wrong."""
        sampling, num_output_tokens = sequence.request.sampling, sequence.num_output_tokens + 1
        reason = finish_reason(sampling, num_output_tokens, sampled.token_id, self._eos_token_ids)
        if sequence.matcher is not None and reason is not FinishReason.STOP:
            matcher = sequence.matcher if sequence.num_choices == 1 else sequence.matcher.fork()
            if matcher.completes(sequence.output_ids, sampled.token_id):
                reason = FinishReason.COMPLETE
        return OutputToken(
            choice=sequence.choice + index, token_id=sampled.token_id, logprobs=sampled.logprobs, finish_reason=reason
        )
