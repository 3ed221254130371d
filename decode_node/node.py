"""The decode node: admits hand-offs, starts each request when its KV has landed, decodes continuously."""

from collections.abc import Iterable

from kvrelay.connector.base import (
    CancelOutcome,
    ConnectorStatistics,
    EndReason,
    Expectation,
    Failed,
    Handover,
    KVReceiver,
    Landed,
    Offered,
    Quarantined,
    Released,
    TransferEvent,
)
from kvrelay.connector.checksum import token_digest
from kvrelay.decode_node.admission import grant_plan
from kvrelay.decode_node.leg import Choice, DecodeLeg, Stage
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.clock import Clock
from kvrelay.engine.engine import Engine, RowOutput, StepOutcome
from kvrelay.engine.errors import Internal, KvrelayError, TransferFailed, Unavailable
from kvrelay.engine.legs import Delta, HandoffReport, Leg, LegReport, Peer
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.planner import Admitted
from kvrelay.engine.request import OutputToken, RequestKey, Sequence
from kvrelay.node.core import NodeCore, OnReport
from kvrelay.node.report import Start

log = get_logger(__name__)


class DecodeNode(NodeCore):
    """The engine thread's side of a decode node."""

    def __init__(
        self,
        engine: Engine,
        scheduler: DecodeScheduler,
        receiver: KVReceiver,
        clock: Clock,
        on_report: OnReport,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__(engine, clock, on_report)
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._receiver = receiver
        self._legs: dict[RequestKey, DecodeLeg] = {}

    # --- messages

    def _start(self, start: Start) -> None:
        request = start.request
        if request.key in self._legs:
            raise Internal(f"attempt {request.key.attempt} of this request is already here")
        if start.leg is Leg.PREFILL:
            raise Internal("a decode node was asked for the leg PREFILL")
        sequence = Sequence(request, matcher=start.matcher)
        if start.leg is Leg.WHOLE:
            self._scheduler.add(sequence)
            self._legs[request.key] = DecodeLeg(sequence, Stage.LOCAL)
            return
        sequence.num_prompt_logprobs = sequence.num_prompt_tokens  # the prefill node gives them
        leg = self._legs[request.key] = DecodeLeg(sequence, Stage.EXPECTED)
        self._receiver.expect(
            Expectation(
                key=request.key,
                peer_epoch=start.peer_epoch,
                num_tokens=request.num_tokens,
                token_digest=token_digest(sequence.token_ids),
                deadline=request.deadline,
            )
        )
        try:
            self._scheduler.expect(sequence)
        except KvrelayError:  # the offer is refused when it comes, or has come: nobody will call for it
            leg.stage = Stage.OVER
            if self._receiver.cancel(request.key) is CancelOutcome.FREED:
                self._give_back(leg)
            raise

    def _cancel(self, key: RequestKey, choice: int | None) -> bool:
        leg = self._legs.get(key)
        if leg is None or leg.stage is Stage.OVER:
            return False
        if choice is not None and self._cancel_choice(leg, choice):
            return True
        if leg.stage is Stage.LOCAL:
            self._end_local(leg)
            return True
        outcome = self._receiver.cancel(key)
        self._take_off(leg)
        if outcome is CancelOutcome.FREED:
            self._give_back(leg)
        return True

    def _cancel_choice(self, leg: DecodeLeg, choice: int) -> bool:
        """Drop one choice. Returns: whether others are left."""
        if leg.choices:
            dropped = leg.choices.pop(choice, None)
            if dropped is not None and dropped.sequence is not None:
                self._scheduler.abort(dropped.sequence)
            return bool(leg.choices)
        if choice in leg.sequence.choices:
            leg.unwanted.add(choice)
        return len(leg.unwanted) < leg.sequence.num_choices

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """Decode nodes are dialled; they dial nobody."""

    # --- the connector's events

    def _serve_events(self) -> None:
        for event in self._receiver.events():
            self._serve_event(event)

    def _serve_event(self, event: TransferEvent) -> None:
        if isinstance(event, Offered):
            leg = self._legs[event.key]
            if leg.stage is Stage.EXPECTED:
                leg.stage, leg.offered_at = Stage.QUEUED, self.clock.now()
                self._scheduler.offered(leg.sequence)
        elif isinstance(event, Landed):
            self._land(self._legs[event.key], event)
        elif isinstance(event, Failed):
            self._transfer_failed(self._legs[event.key], event)
        elif isinstance(event, Quarantined):
            self._quarantine(self._legs[event.key])
        elif isinstance(event, Released):
            self._give_back(self._legs[event.key])

    def _land(self, leg: DecodeLeg, event: Landed) -> None:
        if leg.stage is Stage.OVER:  # it landed while the cancel was on its way: the blocks are ours now
            self._give_back(leg)
            return
        if not self._makes_sense(leg.sequence, event.handover):
            self._say(Delta(key=leg.key, error=Internal("the prefill node's handover makes no sense"), ended=True))
            self._take_off(leg)
            self._give_back(leg)
            return
        leg.stage, leg.owns_grant = Stage.LOCAL, False
        leg.landed_at = leg.granted_at + event.transfer_s  # not now: a step may have lasted meanwhile
        leg.handoff = HandoffReport(
            kv_bytes=event.num_bytes,
            kv_blocks=leg.num_missing_blocks,
            cached_blocks=leg.num_cached_blocks,
            grant_ms=1e3 * (leg.granted_at - leg.offered_at),
            transfer_ms=1e3 * event.transfer_s,
            transport=event.transport,
        )
        self._scheduler.landed(leg.sequence)
        tokens = tuple(token for token in event.handover.first_tokens if token.choice not in leg.unwanted)
        self._begin(leg, tokens, self.engine.go_on(leg.sequence, tokens))
        for token in tokens:
            if token.finish_reason is not None:
                self._tell(leg, token.choice)

    def _makes_sense(self, sequence: Sequence, handover: Handover) -> bool:
        """Whether there is one token for each choice, of the vocabulary, and one at least is no end."""
        tokens = handover.first_tokens
        has_logprobs = sequence.request.sampling.logprobs is not None
        return (
            [token.choice for token in tokens] == list(sequence.choices)
            and all(0 <= token.token_id < self._vocab_size for token in tokens)
            and all((token.logprobs is not None) == has_logprobs for token in tokens)
            and any(token.finish_reason is None for token in tokens)
        )

    def _transfer_failed(self, leg: DecodeLeg, event: Failed) -> None:
        if leg.stage is not Stage.OVER:
            if event.reason == EndReason.FINISHED:  # the first token was the last: the router has it from P
                self._say(Delta(key=leg.key, ended=True))
            else:
                log.info(
                    "kv_handoff_failed",
                    extra=fields(request_id=leg.key.request_id, attempt=leg.key.attempt, reason=event.reason),
                )
                error = TransferFailed(event.reason, retryable=event.retryable)
                self._say(Delta(key=leg.key, error=error, ended=True))
            self._take_off(leg)
        if not leg.owns_grant:
            self._legs.pop(leg.key, None)

    # --- the turn

    def _expire(self) -> None:
        local = [sequence for leg in self._legs.values() if leg.stage is Stage.LOCAL for sequence in leg.sequences]
        for sequence, error in self.engine.expired(local):
            leg = self._legs.get(sequence.key)
            if leg is not None:  # else another choice of the request has said so
                self._say(Delta(key=leg.key, error=error, ended=True))
                self._end_local(leg)

    def _step(self) -> bool:
        started_at = self.clock.now()
        plan, scheduled = self.engine.plan()
        if plan.is_empty and (starved := self._scheduler.starved()) is not None:
            self._fail_starved(self._legs[starved.key])
            return True
        for grant in plan.grants:
            self._grant(self._legs[grant.sequence.key], grant)
        outcome = self.engine.execute(plan, scheduled)
        self._measure(outcome)
        for row in outcome.outputs:
            self._take(row, outcome, started_at)
        return not plan.is_empty

    def _grant(self, leg: DecodeLeg, grant: Admitted) -> None:
        plan = grant_plan(leg.sequence, self.engine.executor.layout.block_size)
        leg.stage, leg.owns_grant, leg.granted_at = Stage.GRANTED, True, self.clock.now()
        leg.num_cached_blocks = len(grant.cached_block_ids)
        leg.num_missing_blocks = sum(len(granted.block_ids) for granted in plan.ranges)
        self._receiver.grant(leg.key, plan)

    def _take(self, row: RowOutput, outcome: StepOutcome, started_at: float) -> None:
        """What a step brought for one sequence: an error, a chunk, or tokens to say."""
        leg = self._legs.get(row.sequence.key)
        if leg is None:  # another choice of its request failed in this step
            return
        if row.error is not None:
            self._say(Delta(key=leg.key, error=row.error, ended=True))
            self._end_local(leg)
            return
        self._say_prompt_logprobs(row)
        if not row.tokens:
            return
        if leg.choices:
            (token,) = row.tokens
            leg.choices[token.choice].unsaid.append(token)
        else:
            self._begin(leg, row.tokens, row.going_on)
        for token in row.tokens:
            report = None if leg.is_reported else self._report(leg, outcome, started_at)
            leg.is_reported = True
            self._tell(leg, token.choice, report)

    def _begin(self, leg: DecodeLeg, tokens: Iterable[OutputToken], going_on: Iterable[Sequence]) -> None:
        """The choices have their first tokens."""
        sequences = {sequence.choice: sequence for sequence in going_on}
        num_said = len(leg.sequence.request.output_token_ids)
        leg.choices = {token.choice: Choice(sequences.get(token.choice), num_said, [token]) for token in tokens}

    def _tell(self, leg: DecodeLeg, choice_index: int, report: LegReport | None = None) -> None:
        """Say what a choice has to say, and see whether that was all, of it and of the leg."""
        choice = leg.choices[choice_index]
        finish_reason = choice.unsaid[-1].finish_reason
        if finish_reason is not None:
            del leg.choices[choice_index]
        if not leg.choices:
            self._legs.pop(leg.key)
        self._say(
            Delta(
                key=leg.key,
                choice=choice_index,
                first_token_index=choice.num_said,
                token_ids=tuple(token.token_id for token in choice.unsaid),
                logprobs=tuple(token.logprobs for token in choice.unsaid if token.logprobs is not None),
                finish_reason=finish_reason,
                report=report,
                ended=not leg.choices,
            )
        )
        choice.num_said += len(choice.unsaid)
        choice.unsaid.clear()

    # --- ends

    def _end_local(self, leg: DecodeLeg) -> None:
        for sequence in leg.sequences:
            self._scheduler.abort(sequence)
        self._legs.pop(leg.key)

    def _quarantine(self, leg: DecodeLeg) -> None:
        """The transfer has ended, and whoever wrote for it may be at it still."""
        log.warning("kv_blocks_quarantined", extra=fields(request_id=leg.key.request_id, attempt=leg.key.attempt))
        if leg.owns_grant:
            self._scheduler.quarantine(leg.sequence)

    def _fail_starved(self, leg: DecodeLeg) -> None:
        """Nothing can go on before the quarantine ends, and nobody knows when that is: another node may do better."""
        num_blocks = self._scheduler.pool.counts().quarantined
        self.is_healthy = False
        log.error("starved_by_quarantine", extra=fields(request_id=leg.key.request_id, num_blocks=num_blocks))
        error = Unavailable(f"{num_blocks} KV blocks of this node are in quarantine: a lost node may still write there")
        self._say(Delta(key=leg.key, error=error, ended=True))
        if leg.stage is Stage.LOCAL:
            self._end_local(leg)
            return
        outcome = self._receiver.cancel(leg.key)
        self._take_off(leg)
        if outcome is CancelOutcome.FREED:
            self._give_back(leg)

    def _take_off(self, leg: DecodeLeg) -> None:
        """Nobody waits for this hand-off any more; what was granted stays with the transfer."""
        self._scheduler.abort(leg.sequence)
        leg.stage = Stage.OVER

    def _give_back(self, leg: DecodeLeg) -> None:
        """The connector has said its last word on this leg."""
        if leg.owns_grant:
            leg.owns_grant = False
            self._scheduler.give_back(leg.sequence)
            self.is_healthy = self.is_healthy or not self._scheduler.pool.counts().quarantined
        self._legs.pop(leg.key, None)

    # --- statistics

    def _report(self, leg: DecodeLeg, outcome: StepOutcome, started_at: float) -> LegReport:
        sequence = leg.sequence
        if leg.handoff is None:
            scheduled_at = sequence.first_scheduled_at
            assert scheduled_at is not None
            return LegReport(
                queue_ms=1e3 * (scheduled_at - sequence.request.arrival),
                compute_ms=1e3 * (self.clock.now() - scheduled_at),
                num_cached_tokens=sequence.num_cached_tokens,
            )
        return LegReport(
            queue_ms=1e3 * max(0.0, started_at - leg.landed_at),
            compute_ms=1e3 * outcome.duration_s,
            num_cached_tokens=sequence.num_cached_tokens,
            handoff=leg.handoff,
        )

    def _deadlines(self) -> Iterable[float]:
        return (leg.sequence.request.deadline for leg in self._legs.values() if leg.stage is Stage.LOCAL)

    def _num_live(self) -> int:
        return len(self._legs)

    def _waiting(self) -> Iterable[Sequence]:
        return (*self._scheduler.waiting, *self._scheduler.expected)

    def _num_waiting_tokens(self) -> int:
        return sum(
            sequence.num_tokens - sequence.num_computed_tokens
            for leg in self._legs.values()
            if leg.stage is Stage.LOCAL  # what another node computes is no work here
            for sequence in leg.sequences
        )

    def transfer_statistics(self) -> ConnectorStatistics:
        return self._receiver.statistics()

    def close(self) -> None:
        self._receiver.close()
