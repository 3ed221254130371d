"""The life of a request across nodes: placed, started on both legs at once, merged, told to the client, ended.

Whatever way a request leaves (finished, failed, cancelled, out of time), `_attempt` removes its entry and cancels the
legs that have not ended. Nothing here waits but for a node's next word.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.legs import Delta, Leg, LegReport, TraceContext
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.request import Request, RequestKey
from kvrelay.router.api import Handoff, Output, Summary, Timings, Usage
from kvrelay.router.detokenizer import make_output_texts
from kvrelay.router.messages import Cancel, Start, ToNode
from kvrelay.router.observer import RequestObserver
from kvrelay.router.policy import Placement, RequestFacts, place
from kvrelay.router.prefix_index import PromptBlocks
from kvrelay.router.race import NewTokens, Race
from kvrelay.router.registry import Node, Registry
from kvrelay.router.stopwatch import Stopwatch
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.traces import RequestTraces

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


class _Answer:
    """What of one request has gone to its client, over all attempts."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.stopwatch = Stopwatch(request.arrival)
        self.texts = make_output_texts(tokenizer, request)
        self.num_open_choices = request.sampling.n
        self.num_tokens = 0
        self.entry: _Entry | None = None  # of the last attempt

    def timings(self, now: float) -> Timings:
        """As far as they are known by now."""
        if self.entry is None:
            return self.stopwatch.timings(None, None, now)
        return self.stopwatch.timings(*_reports(self.entry), now)


class Dispatcher:
    """Every request that runs through this router. Belongs to the event loop."""

    def __init__(
        self,
        registry: Registry,
        nodes: Nodes,
        tokenizer: Tokenizer,
        clock: Clock,
        observers: Sequence[RequestObserver] = (),
        traces: RequestTraces | None = None,
    ) -> None:
        self._traces = traces
        self._observers = tuple(observers) if traces is None else (*observers, traces)
        self._registry = registry
        self._nodes = nodes
        self._tokenizer = tokenizer
        self._clock = clock
        self._entries: dict[RequestKey, _Entry] = {}
        self._num_finished = 0
        self._num_failed = 0
        self._num_left = 0
        self._num_late_deltas = 0

    async def generate(
        self,
        request: Request,
        trace: TraceContext | None = None,
        on_output: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Output]:
        """Run a request; the last output has the summary. To be closed (`aclosing`), whatever happens.

        `on_output`: called before each output goes out. Raises: KvrelayError, Unavailable if a node or a leg was lost.
        """
        outcome = "LEFT"
        answer = _Answer(request, self._tokenizer)
        if self._traces is not None:
            trace = self._traces.begin(request, trace)
        try:
            with self._attempt(request, trace) as entry:
                answer.entry = entry
                answer.stopwatch.sent(self._clock.now())
                while answer.num_open_choices:
                    await entry.changed.wait()
                    entry.changed.clear()
                    now = self._clock.now()
                    for output in self._outputs(request, entry, answer, now):
                        if output.summary is not None:
                            outcome = output.finish_reason or outcome
                            self._num_finished += 1
                        for observer in self._observers:
                            observer.output(request, output, now)
                        on_output()
                        yield output
                    if entry.race.error is not None and answer.num_open_choices:
                        raise entry.race.error
        except KvrelayError as error:
            outcome = error.code
            self._num_failed += 1
            raise
        finally:
            self._num_left += outcome == "LEFT"
            now = self._clock.now()
            _log_end(request, outcome, answer, now)
            timings = answer.timings(now)
            for observer in self._observers:
                observer.ended(request, outcome, timings, now)

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

    @contextmanager
    def _attempt(self, request: Request, trace: TraceContext | None) -> Iterator[_Entry]:
        """Place a request and start its legs; at the end, however it comes, forget it and cancel what still runs.

        Raises: Unavailable, InvalidArgument.
        """
        facts = RequestFacts(
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            num_choices=request.sampling.n,
            blocks=PromptBlocks(request.prompt_token_ids, request.cache_salt),
            needs_every_output=request.sampling.prompt_logprobs is not None,
        )
        placement = place(self._registry, facts)
        legs = _legs(placement)
        entry = _Entry(placement, Race({node.facts.epoch: leg for node, leg, _ in legs}, request))
        self._entries[request.key] = entry
        try:
            for observer in self._observers:
                observer.started(request, placement, trace)
            for node, leg, peer_epoch in legs:
                to_compute = 0 if leg is Leg.DECODE else placement.num_to_compute
                self._start(request, trace, node, leg, peer_epoch, to_compute)
            yield entry
        finally:
            del self._entries[request.key]
            for epoch in entry.race.open_legs:
                self._nodes.send(epoch, Cancel(request.key))

    def _start(
        self, request: Request, trace: TraceContext | None, node: Node, leg: Leg, peer_epoch: str, to_compute: int
    ) -> None:
        self._registry.note_placed(
            node,
            to_compute=to_compute,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=1 if leg is Leg.PREFILL else request.sampling.n,
        )
        start = Start(
            leg=leg,
            request=request,
            timeout_s=request.deadline - self._clock.now(),
            peer_epoch=peer_epoch,
            trace=trace,
        )
        self._nodes.send(node.facts.epoch, start)

    def _outputs(self, request: Request, entry: _Entry, answer: _Answer, now: float) -> Iterator[Output]:
        """What the legs have said since the last time, as the client gets it."""
        while True:
            first, logprobs = entry.race.take_prompt_logprobs()
            if not logprobs:
                break
            yield Output(choice=0, prompt_logprobs=logprobs, first_prompt_index=first)
        for new in entry.race.take():
            yield self._output(request, entry, answer, new, now)

    def _output(self, request: Request, entry: _Entry, answer: _Answer, new: NewTokens, now: float) -> Output:
        piece = answer.texts[new.choice].feed(new.token_ids, new.finish_reason)
        answer.num_tokens += piece.num_tokens
        answer.stopwatch.tokens_out(new.first_index + piece.num_tokens, now)
        if piece.finish_reason is not None:
            answer.num_open_choices -= 1
            if entry.race.stop(new.choice) and answer.num_open_choices:
                for epoch in entry.race.open_legs:
                    self._nodes.send(epoch, Cancel(request.key, new.choice))
        return Output(
            choice=new.choice,
            text=piece.text,
            token_ids=new.token_ids[: piece.num_tokens],
            first_token_index=new.first_index,
            logprobs=new.logprobs[: piece.num_tokens],
            finish_reason=piece.finish_reason,
            summary=None if answer.num_open_choices else self._summarise(request, entry, answer, now),
        )

    def _summarise(self, request: Request, entry: _Entry, answer: _Answer, now: float) -> Summary:
        first, decode = _reports(entry)
        return Summary(
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=answer.num_tokens,
                cached_tokens=first.num_cached_tokens if first else 0,
            ),
            timings=answer.timings(now),
            handoff=_handoff(entry.placement, decode),
        )


def _legs(placement: Placement) -> tuple[tuple[Node, Leg, str], ...]:
    """Who runs what, and with whom."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is None:
        return ((decode, Leg.WHOLE, ""),)
    return ((prefill, Leg.PREFILL, decode.facts.epoch), (decode, Leg.DECODE, prefill.facts.epoch))


def _reports(entry: _Entry) -> tuple[LegReport | None, LegReport | None]:
    """Of the leg that samples the first token, and of the decode leg: None where that is the same one."""
    reports = entry.race.reports
    if entry.placement.prefill is None:
        return reports.get(Leg.WHOLE), None
    return reports.get(Leg.PREFILL), reports.get(Leg.DECODE, LegReport())


def _handoff(placement: Placement, decode: LegReport | None) -> Handoff | None:
    if placement.prefill is None or decode is None or decode.handoff is None:
        return None
    return Handoff(
        report=decode.handoff, prefill_node=placement.prefill.facts.name, decode_node=placement.decode.facts.name
    )


def _log_end(request: Request, outcome: str, answer: _Answer, now: float) -> None:
    log.info(
        "request_ended",
        extra=fields(
            request_id=request.key.request_id,
            attempt=request.key.attempt,
            outcome=outcome,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=answer.num_tokens,
            ttft_ms=answer.stopwatch.ttft_ms,
            total_ms=(now - request.arrival) * 1e3,
        ),
    )
