"""The life of a request across nodes: placed, started on both legs at once, merged, told to the client, ended.

Whatever way a request leaves (finished, failed, cancelled, out of time), `_attempt` removes its entry and cancels the
legs that have not ended. Nothing here waits but for a node's next word.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import Request, RequestKey
from kvrelay.router.api import Handoff, Output, Summary, Usage
from kvrelay.router.detokenizer import OutputText, Piece
from kvrelay.router.messages import Cancel, Start, ToNode, TraceContext
from kvrelay.router.policy import Placement, RequestFacts, place
from kvrelay.router.race import Race
from kvrelay.router.registry import Node, Registry
from kvrelay.router.stopwatch import Stopwatch
from kvrelay.router.tokenizer import Tokenizer

log = get_logger(__name__)


class Nodes(Protocol):
    """The way to the nodes."""

    def send(self, epoch: str, message: ToNode) -> None:
        """Queue a message for a node, in order. For a node that is gone: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStatistics:
    """A snapshot for /metrics."""

    num_running: int
    num_finished: int
    num_failed: int
    num_left: int  # cancelled, out of time
    num_late_deltas: int


@dataclass(slots=True, eq=False)
class _Entry:
    """One attempt that runs. The nodes' streams write to `race`; the request's own task reads after `changed`."""

    placement: Placement
    race: Race
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """Every request that runs through this router. Belongs to the event loop."""

    def __init__(self, registry: Registry, nodes: Nodes, tokenizer: Tokenizer, clock: Clock) -> None:
        self._registry = registry
        self._nodes = nodes
        self._tokenizer = tokenizer
        self._clock = clock
        self._entries: dict[RequestKey, _Entry] = {}
        self._num_finished = 0
        self._num_failed = 0
        self._num_left = 0
        self._num_late_deltas = 0

    async def generate(self, request: Request, trace: TraceContext | None = None) -> AsyncGenerator[Output]:
        """Run a request; the last output has the finish reason. To be closed (`aclosing`), whatever happens.

        Raises: KvrelayError, Unavailable if a node or a leg was lost.
        """
        outcome, num_tokens = "LEFT", 0
        stopwatch = Stopwatch(request.arrival)
        try:
            async with aclosing(self._run(request, trace, stopwatch)) as outputs:
                async for output in outputs:
                    num_tokens = output.first_token_index + len(output.token_ids)
                    if output.finish_reason is not None:
                        outcome = output.finish_reason
                        self._num_finished += 1
                    yield output
        except KvrelayError as error:
            outcome = error.code
            self._num_failed += 1
            raise
        finally:
            self._num_left += outcome == "LEFT"
            _log_end(request, outcome, num_tokens, stopwatch, self._clock.now())

    def deliver(self, epoch: str, delta: Delta) -> None:
        """A node's word on one of its legs. What belongs to no open leg of that node came late: it is counted."""
        entry = self._entries.get(delta.key)
        if entry is None or not entry.race.receive(epoch, delta):
            self._num_late_deltas += 1
            return
        entry.changed.set()

    def lose_node(self, epoch: str, error: KvrelayError) -> None:
        """A node is gone, and every leg on it."""
        for entry in self._entries.values():
            if entry.race.lose(epoch, error):
                entry.changed.set()

    def close(self, error: KvrelayError) -> None:
        """Fail whatever still runs."""
        for entry in self._entries.values():
            entry.race.abort(error)
            entry.changed.set()

    def statistics(self) -> DispatchStatistics:
        return DispatchStatistics(
            num_running=len(self._entries),
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_left=self._num_left,
            num_late_deltas=self._num_late_deltas,
        )

    async def _run(self, request: Request, trace: TraceContext | None, stopwatch: Stopwatch) -> AsyncGenerator[Output]:
        """Run attempts until one brings the output home. There is one: a lost leg is the request's end."""
        text = OutputText(self._tokenizer, request.sampling)
        with self._attempt(request, trace) as entry:
            stopwatch.sent(self._clock.now())
            race = entry.race
            while True:
                await entry.changed.wait()
                entry.changed.clear()
                first, token_ids = race.take()
                if token_ids or race.finish_reason is not None:
                    stopwatch.tokens_out(first + len(token_ids), self._clock.now())
                    piece = text.feed(token_ids, race.finish_reason)
                    yield self._output(request, entry, first, token_ids[: piece.num_tokens], piece, stopwatch)
                    if piece.finish_reason is not None:
                        return
                if race.error is not None:
                    raise race.error

    @contextmanager
    def _attempt(self, request: Request, trace: TraceContext | None) -> Iterator[_Entry]:
        """Place a request and start its legs; at the end, however it comes, forget it and cancel what still runs.

        Raises: Unavailable, InvalidArgument.
        """
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        facts = RequestFacts(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        placement = place(self._registry, facts)
        legs = _legs(placement)
        entry = _Entry(placement, Race({node.facts.epoch: leg for node, leg, _ in legs}, max_tokens))
        self._entries[request.key] = entry
        try:
            for node, leg, peer_epoch in legs:
                self._start(request, trace, node, leg, peer_epoch)
            yield entry
        finally:
            del self._entries[request.key]
            for epoch in entry.race.open_legs:
                self._nodes.send(epoch, Cancel(request.key))

    def _start(self, request: Request, trace: TraceContext | None, node: Node, leg: Leg, peer_epoch: str) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        computed = 0 if leg is Leg.DECODE else num_prompt_tokens
        self._registry.note_placed(node, num_prompt_tokens=computed, holds_tokens=num_prompt_tokens + 1)
        start = Start(
            leg=leg,
            request=request,
            timeout_s=request.deadline - self._clock.now(),
            peer_epoch=peer_epoch,
            trace=trace,
        )
        self._nodes.send(node.facts.epoch, start)

    def _output(
        self,
        request: Request,
        entry: _Entry,
        first: int,
        token_ids: list[int],
        piece: Piece,
        stopwatch: Stopwatch,
    ) -> Output:
        is_last = piece.finish_reason is not None
        num_tokens = first + len(token_ids)
        return Output(
            choice=0,
            text=piece.text,
            token_ids=token_ids,
            first_token_index=first,
            finish_reason=piece.finish_reason,
            summary=self._summarise(request, entry, num_tokens, stopwatch) if is_last else None,
        )

    def _summarise(self, request: Request, entry: _Entry, num_tokens: int, stopwatch: Stopwatch) -> Summary:
        reports = entry.race.reports
        prefill = entry.placement.prefill
        first = reports.get(Leg.WHOLE if prefill is None else Leg.PREFILL)
        decode = None if prefill is None else reports.get(Leg.DECODE, LegReport())
        return Summary(
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=num_tokens,
                cached_tokens=first.num_cached_tokens if first else 0,
            ),
            timings=stopwatch.timings(first, decode, self._clock.now()),
            handoff=_handoff(entry.placement, decode),
        )


def _legs(placement: Placement) -> tuple[tuple[Node, Leg, str], ...]:
    """Who runs what, and with whom."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is None:
        return ((decode, Leg.WHOLE, ""),)
    return ((prefill, Leg.PREFILL, decode.facts.epoch), (decode, Leg.DECODE, prefill.facts.epoch))


def _handoff(placement: Placement, decode: LegReport | None) -> Handoff | None:
    if placement.prefill is None or decode is None or decode.handoff is None:
        return None
    return Handoff(
        report=decode.handoff, prefill_node=placement.prefill.facts.name, decode_node=placement.decode.facts.name
    )


def _log_end(request: Request, outcome: str, num_tokens: int, stopwatch: Stopwatch, now: float) -> None:
    log.info(
        "request_ended",
        extra=fields(
            request_id=request.key.request_id,
            attempt=request.key.attempt,
            outcome=outcome,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=num_tokens,
            ttft_ms=stopwatch.ttft_ms,
            total_ms=(now - request.arrival) * 1e3,
        ),
    )
