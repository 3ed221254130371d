"""The decode node: admits hand-offs, starts each request when its KV has landed, decodes continuously.

The life of a leg here: EXPECTED (the router has called) -> QUEUED (P has offered; it stands in line with this node's
own prompts) -> GRANTED (a transfer owns its blocks and fills them) -> LOCAL (landed: it decodes). A whole leg is LOCAL
from the start. Whatever ends it on the way, its blocks come back once no write can reach them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

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
    Released,
    TransferEvent,
)
from kvrelay.connector.checksum import token_digest
from kvrelay.decode_node.admission import grant_plan
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.clock import Clock
from kvrelay.engine.engine import Engine, RowOutput, StepOutcome
from kvrelay.engine.errors import Internal, TransferFailed
from kvrelay.engine.legs import Delta, HandoffReport, Leg, LegReport, Peer
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey, Sequence
from kvrelay.engine.scheduler import Admitted
from kvrelay.node.core import NodeCore, OnReport
from kvrelay.node.report import Start

log = get_logger(__name__)


class Stage(Enum):
    """Who has a leg in hand."""

    EXPECTED = auto()  # the connector; no blocks
    QUEUED = auto()  # the scheduler's queue; no blocks
    GRANTED = auto()  # the transfer, which owns the blocks
    LOCAL = auto()  # the scheduler
    OVER = auto()  # nobody wants it; kept until the connector has said its last word


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """One request on this node."""

    sequence: Sequence
    stage: Stage
    received_at: float
    offered_at: float = 0.0
    granted_at: float = 0.0
    landed_at: float = 0.0
    num_missing_blocks: int = 0
    num_cached_blocks: int = 0
    owns_grant: bool = False  # the transfer still holds what was granted
    handoff: HandoffReport | None = None
    num_said: int = field(init=False)  # output tokens that the router knows

    def __post_init__(self) -> None:
        self.num_said = len(self.sequence.request.output_token_ids)

    @property
    def key(self) -> RequestKey:
        return self.sequence.key


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
        sequence = Sequence(request)
        if start.leg is Leg.WHOLE:
            self._scheduler.add(sequence)
            self._legs[request.key] = DecodeLeg(sequence, Stage.LOCAL, self.clock.now())
            return
        self._scheduler.expect(sequence)
        self._legs[request.key] = DecodeLeg(sequence, Stage.EXPECTED, self.clock.now())
        self._receiver.expect(
            Expectation(
                key=request.key,
                peer_epoch=start.peer_epoch,
                num_tokens=request.num_tokens,
                token_digest=token_digest(sequence.token_ids),
                deadline=request.deadline,
            )
        )

    def cancel(self, key: RequestKey) -> None:
        leg = self._legs.get(key)
        if leg is None or leg.stage is Stage.OVER:
            return
        if leg.stage is Stage.LOCAL:
            self._end_local(leg)
            return
        outcome = self._receiver.cancel(key)
        self._take_off(leg)
        if outcome is CancelOutcome.FREED:
            self._give_back(leg)

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
        elif isinstance(event, Released):
            self._give_back(self._legs[event.key])

    def _land(self, leg: DecodeLeg, event: Landed) -> None:
        if leg.stage is Stage.OVER:  # it landed while the cancel was on its way: the blocks are ours now
            self._give_back(leg)
            return
        token_id = self._first_token_id(event.handover)
        if token_id is None:
            self._say(Delta(key=leg.key, error=Internal("the prefill node's handover makes no sense"), ended=True))
            self._take_off(leg)
            self._give_back(leg)
            return
        leg.stage, leg.owns_grant, leg.landed_at = Stage.LOCAL, False, self.clock.now()
        self._scheduler.landed(leg.sequence, token_id)
        leg.handoff = HandoffReport(
            kv_bytes=event.num_bytes,
            kv_blocks=leg.num_missing_blocks,
            cached_blocks=leg.num_cached_blocks,
            grant_ms=1e3 * (leg.granted_at - leg.offered_at),
            transfer_ms=1e3 * event.transfer_s,
            transport=event.transport,
        )

    def _first_token_id(self, handover: Handover) -> int | None:
        """The token to go on from: one alone, of the vocabulary, that ends nothing. None: the peer makes no sense."""
        if len(handover.first_tokens) != 1:
            return None
        (first,) = handover.first_tokens
        fits = first.choice == 0 and 0 <= first.token_id < self._vocab_size and first.finish_reason is None
        return first.token_id if fits else None

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
        local = [leg.sequence for leg in self._legs.values() if leg.stage is Stage.LOCAL]
        for sequence, error in self.engine.expired(local):
            self._say(Delta(key=sequence.key, error=error, ended=True))
            self._end_local(self._legs[sequence.key])

    def _step(self) -> bool:
        started_at = self.clock.now()
        plan, scheduled = self.engine.plan()
        for grant in plan.grants:
            self._grant(self._legs[grant.sequence.key], grant)
        outcome = self.engine.execute(plan, scheduled)
        self._measure(outcome)
        for row in outcome.outputs:
            self._take(self._legs[row.sequence.key], row, outcome, started_at)
        return not plan.is_empty

    def _grant(self, leg: DecodeLeg, grant: Admitted) -> None:
        plan = grant_plan(leg.sequence, self.engine.executor.layout.block_size)
        leg.stage, leg.owns_grant, leg.granted_at = Stage.GRANTED, True, self.clock.now()
        leg.num_cached_blocks = len(grant.cached_block_ids)
        leg.num_missing_blocks = sum(len(granted.block_ids) for granted in plan.ranges)
        self._receiver.grant(leg.key, plan)

    def _take(self, leg: DecodeLeg, row: RowOutput, outcome: StepOutcome, started_at: float) -> None:
        """What a step brought for one sequence: an error, a chunk, or a token to say."""
        if row.error is not None:
            self._say(Delta(key=leg.key, error=row.error, ended=True))
            self._legs.pop(leg.key)
            return
        if row.token_id is None:
            return
        sequence = leg.sequence
        first = leg.num_said
        is_first = first == len(sequence.request.output_token_ids)
        report = self._report(leg, outcome, started_at) if is_first else None
        self._say(
            Delta(
                key=leg.key,
                first_token_index=first,
                token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + first :]),
                finish_reason=row.finish_reason,
                report=report,
                ended=row.finish_reason is not None,
            )
        )
        leg.num_said = sequence.num_output_tokens
        if row.finish_reason is not None:
            self._legs.pop(leg.key)

    # --- ends

    def _end_local(self, leg: DecodeLeg) -> None:
        self._scheduler.abort(leg.sequence)
        self._legs.pop(leg.key)

    def _take_off(self, leg: DecodeLeg) -> None:
        """Nobody waits for this hand-off any more; what was granted stays with the transfer."""
        self._scheduler.abort(leg.sequence)
        leg.stage = Stage.OVER

    def _give_back(self, leg: DecodeLeg) -> None:
        """The connector has said its last word on this leg."""
        if leg.owns_grant:
            leg.owns_grant = False
            self._scheduler.give_back(leg.sequence)
        self._legs.pop(leg.key, None)

    # --- statistics

    def _report(self, leg: DecodeLeg, outcome: StepOutcome, started_at: float) -> LegReport:
        sequence = leg.sequence
        if leg.handoff is None:
            scheduled_at = sequence.first_scheduled_at
            assert scheduled_at is not None
            return LegReport(
                queue_ms=1e3 * (scheduled_at - leg.received_at),
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

    def _num_waiting_tokens(self) -> int:
        return sum(
            leg.sequence.num_tokens - leg.sequence.num_computed_tokens
            for leg in self._legs.values()
            if leg.stage is not Stage.OVER
        )

    def transfer_statistics(self) -> ConnectorStatistics:
        return self._receiver.statistics()

    def close(self) -> None:
        self._receiver.close()
