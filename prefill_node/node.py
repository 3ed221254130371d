"""The prefill node: computes prompts, offers and pushes their KV while it computes, hands the first token over.

The life of a leg here: queued -> admitted with every block the prompt needs, and offered in the same turn -> chunks,
each pushed when it is final -> first tokens, one a choice: said to the router, and committed to D. From the offer on,
the transfer holds its own reference on the blocks; the request's ends with its first tokens or before, the transfer's
with Released.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.connector.base import (
    CancelOutcome,
    ConnectorStatistics,
    EndReason,
    Failed,
    Handover,
    KVSender,
    Offer,
    Released,
    TokenRange,
    TransferEvent,
)
from kvrelay.connector.checksum import block_digest, token_digest
from kvrelay.engine.clock import Clock
from kvrelay.engine.engine import Engine, RowOutput
from kvrelay.engine.errors import Internal, KvrelayError, TransferFailed
from kvrelay.engine.legs import Delta, Leg, LegReport, Peer
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import RequestKey, Sequence
from kvrelay.node.core import NodeCore, OnReport
from kvrelay.node.report import Start

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """One prompt on its way through this node."""

    sequence: Sequence
    peer_epoch: str
    pinned: tuple[int, ...] = ()  # blocks on which the transfer holds a reference
    num_pushed: int = 0  # tokens whose KV the sender may read
    computing: bool = True  # the request has not had its first tokens, nor failed

    @property
    def key(self) -> RequestKey:
        return self.sequence.key


class PrefillNode(NodeCore):
    """The engine thread's side of a prefill node. Its engine hands over: a prompt ends here with its first tokens."""

    def __init__(
        self, engine: Engine, sender: KVSender, clock: Clock, on_report: OnReport, *, kv_digests: bool = False
    ) -> None:
        super().__init__(engine, clock, on_report)
        self._sender = sender
        self._kv_digests = kv_digests
        self._legs: dict[RequestKey, PrefillLeg] = {}
        self._peers: dict[str, Peer] = {}

    # --- messages

    def _start(self, start: Start) -> None:
        key = start.request.key
        if start.leg is not Leg.PREFILL:
            raise Internal(f"a prefill node was asked for the leg {start.leg.name}")
        if key in self._legs:
            raise Internal(f"attempt {key.attempt} of this request is already here")
        leg = PrefillLeg(Sequence(start.request, matcher=start.matcher), start.peer_epoch)
        self.engine.scheduler.add(leg.sequence)
        self._legs[key] = leg

    def _cancel(self, key: RequestKey, choice: int | None) -> bool:
        leg = self._legs.get(key)
        if leg is None or choice is not None:  # what one choice leaves out is the decode node's
            return False
        self._abandon(leg, EndReason.CANCELLED)
        return True

    def set_peers(self, peers: Iterable[Peer]) -> None:
        wanted = {peer.epoch: peer for peer in peers}
        for epoch in self._peers.keys() - wanted.keys():
            self._sender.disconnect(epoch)
        for epoch in wanted.keys() - self._peers.keys():
            self._sender.connect(epoch, wanted[epoch].connector_address)
        self._peers = wanted

    # --- the turn

    def _serve_events(self) -> None:
        for event in self._sender.events():
            self._serve_event(event)

    def _serve_event(self, event: TransferEvent) -> None:
        if isinstance(event, Released):
            leg = self._legs[event.key]
            self._unpin(leg)
        elif isinstance(event, Failed):
            leg = self._legs[event.key]
            log.info(
                "kv_handoff_failed",
                extra=fields(request_id=event.key.request_id, attempt=event.key.attempt, reason=event.reason),
            )
            if leg.computing:
                self._drop(leg)
                error = TransferFailed(event.reason, retryable=event.retryable)
                self._say(Delta(key=leg.key, error=error, ended=True))

    def _expire(self) -> None:
        computing = [leg.sequence for leg in self._legs.values() if leg.computing]
        for sequence, error in self.engine.expired(computing):
            self._fail(self._legs[sequence.key], error, EndReason.DEADLINE)

    def _step(self) -> bool:
        plan, scheduled = self.engine.plan()
        assert not plan.preempted, "a prompt holds all its blocks from the start"
        for admission in plan.admitted:
            self._offer(self._legs[admission.sequence.key])
        outcome = self.engine.execute(plan, scheduled)
        self._measure(outcome)
        for row in outcome.outputs:
            self._take(self._legs[row.sequence.key], row)
        return not plan.is_empty

    def _offer(self, leg: PrefillLeg) -> None:
        sequence = leg.sequence
        leg.pinned = tuple(sequence.block_table)
        self.engine.scheduler.pool.acquire(leg.pinned)
        self._sender.offer(
            Offer(
                key=leg.key,
                peer_epoch=leg.peer_epoch,
                num_tokens=sequence.num_tokens,
                token_digest=token_digest(sequence.token_ids),
                block_ids=leg.pinned,
                deadline=sequence.request.deadline,
            )
        )
        self._push(leg, sequence.num_computed_tokens)  # what the prefix cache held

    def _take(self, leg: PrefillLeg, row: RowOutput) -> None:
        """What a step brought for one prompt: a chunk to push, and perhaps its first tokens."""
        if row.error is not None:
            self._fail(leg, row.error, EndReason.CANCELLED)
            return
        self._say_prompt_logprobs(row)
        if not row.tokens:
            block_size = self.engine.executor.layout.block_size
            self._push(leg, row.end // block_size * block_size)
            return
        self._zero_tail(leg, row.end)
        self._push(leg, row.end)
        self._hand_over(leg, row)

    def _hand_over(self, leg: PrefillLeg, row: RowOutput) -> None:
        leg.computing = False
        first, last = row.tokens[0], row.tokens[-1]
        for token in row.tokens:
            self._say(
                Delta(
                    key=leg.key,
                    choice=token.choice,
                    first_token_index=len(leg.sequence.request.output_token_ids),
                    token_ids=(token.token_id,),
                    logprobs=() if token.logprobs is None else (token.logprobs,),
                    finish_reason=token.finish_reason,
                    report=self._report(leg) if token is first else None,
                    ended=token is last,
                )
            )
        if all(token.finish_reason is not None for token in row.tokens):
            self._stop_transfer(leg, EndReason.FINISHED)
            return
        digests = tuple(block_digest(self.engine.executor.region[b]) for b in leg.pinned) if self._kv_digests else ()
        self._forget_if_over(leg)
        self._sender.commit(
            leg.key,
            Handover(first_tokens=row.tokens, num_cached_tokens=leg.sequence.num_cached_tokens, block_digests=digests),
        )

    # --- blocks

    def _push(self, leg: PrefillLeg, end: int) -> None:
        if end > leg.num_pushed:
            self._sender.push(leg.key, TokenRange(leg.num_pushed, end))
            leg.num_pushed = end

    def _zero_tail(self, leg: PrefillLeg, num_tokens: int) -> None:
        """A partial block travels whole: what it holds of an earlier owner must not travel with it."""
        block_size = self.engine.executor.layout.block_size
        if num_tokens % block_size:
            self.engine.executor.zero_slots(leg.pinned[num_tokens // block_size], num_tokens % block_size)

    def _drop(self, leg: PrefillLeg) -> None:
        """The request lets go of its blocks; the transfer may still hold them."""
        if leg.computing:
            leg.computing = False
            self.engine.scheduler.finish(leg.sequence)
        self._forget_if_over(leg)

    def _unpin(self, leg: PrefillLeg) -> None:
        self.engine.scheduler.pool.release(leg.pinned)
        leg.pinned = ()
        self._forget_if_over(leg)

    def _forget_if_over(self, leg: PrefillLeg) -> None:
        if not leg.computing and not leg.pinned:
            del self._legs[leg.key]

    def _stop_transfer(self, leg: PrefillLeg, reason: EndReason) -> None:
        if leg.pinned and self._sender.cancel(leg.key, reason) is CancelOutcome.FREED:
            self._unpin(leg)

    def _abandon(self, leg: PrefillLeg, reason: EndReason) -> None:
        self._drop(leg)
        self._stop_transfer(leg, reason)

    def _fail(self, leg: PrefillLeg, error: KvrelayError, reason: EndReason) -> None:
        self._say(Delta(key=leg.key, error=error, ended=True))
        self._flush()  # before D hears that nothing comes, and tells the router so without the reason
        self._abandon(leg, reason)

    # --- statistics

    def _report(self, leg: PrefillLeg) -> LegReport:
        scheduled_at = leg.sequence.first_scheduled_at
        assert scheduled_at is not None
        return LegReport(
            queue_ms=1e3 * (scheduled_at - leg.sequence.request.arrival),
            compute_ms=1e3 * (self.clock.now() - scheduled_at),
            num_cached_tokens=leg.sequence.num_cached_tokens,
        )

    def _deadlines(self) -> Iterable[float]:
        return (leg.sequence.request.deadline for leg in self._legs.values() if leg.computing)

    def _num_live(self) -> int:
        return len(self._legs)

    def _waiting(self) -> Iterable[Sequence]:
        return self.engine.scheduler.waiting

    def _num_waiting_tokens(self) -> int:
        return sum(
            leg.sequence.num_tokens - leg.sequence.num_computed_tokens for leg in self._legs.values() if leg.computing
        )

    def transfer_statistics(self) -> ConnectorStatistics:
        return self._sender.statistics()

    def close(self) -> None:
        self._sender.close()
