"""What is counted of requests, for /metrics, `kvrelay top` and the page.

`RequestMetrics` is told of each request's life and counts; `statistics()` is all that anybody else sees of it. A token
costs it well under a microsecond. What the nodes count is not here: they report it themselves.
"""

from collections import Counter
from dataclasses import dataclass

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.metrics import Histogram, HistogramSnapshot, Recent, decades, fine_decades
from kvrelay.engine.request import FinishReason, Request
from kvrelay.router.api import Output, Summary, Timings
from kvrelay.router.node_statistics import OTHER, TRANSPORTS
from kvrelay.router.policy import Placement

LEFT = "left"  # cancelled, or out of time
# The times that DESIGN.md splits a request in, by the names of their fields in Timings, without their unit.
SEGMENTS = (
    "route",
    "prefill_queue",
    "prefill",
    "first_token_out",
    "exposed_transfer",
    "decode_queue",
    "first_decode_step",
)
_AFTER_FIRST = frozenset(("exposed_transfer", "decode_queue", "first_decode_step"))

# Quantiles of late are estimated from these; what is exposed has every third of their bounds or so.
_FIRST_TOKEN_SECONDS = fine_decades(-3, 3)
_TOKEN_SECONDS = fine_decades(-4, 2)
_REQUEST_SECONDS = decades(-3, 3)
_SEGMENT_SECONDS = decades(-4, 3)
_TRANSFER_SECONDS = decades(-4, 2)
_TRANSFER_BYTES = tuple(float(2**i) for i in range(12, 35, 2))
_LENGTHS = tuple(float(2**i) for i in range(18))


def _codes(kind: type[KvrelayError]) -> set[str]:
    return {kind.code}.union(*map(_codes, kind.__subclasses__()))


# How requests end. A node's error may carry any code; one that is not ours counts as OTHER.
OUTCOMES = frozenset({*FinishReason, LEFT, OTHER, *(code.lower() for code in _codes(KvrelayError))})


@dataclass(frozen=True, slots=True)
class Transfers:
    """The hand-offs of finished requests over one transport."""

    seconds: HistogramSnapshot  # granted -> landed
    size_bytes: HistogramSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Lately:
    """What came since about a minute ago."""

    window_s: float
    num_output_tokens: int
    num_finished: int
    ttft_seconds: HistogramSnapshot
    itl_seconds: HistogramSnapshot

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatistics:
    """A snapshot. Counters are since the router's start."""

    num_started: int  # placed on nodes
    num_whole: int  # of these, on one node alone
    outcomes: dict[str, int]  # how requests ended; all of OUTCOMES
    num_prompt_tokens: int  # of requests that were placed
    num_cached_tokens: int  # of finished requests
    num_output_tokens: int
    num_kv_blocks: int  # handed over by finished requests, and those the decode node had already
    num_kv_blocks_cached: int
    ttft_seconds: HistogramSnapshot
    itl_seconds: HistogramSnapshot  # each gap between two outputs of a choice that bring tokens
    tpot_seconds: HistogramSnapshot  # one a choice of two tokens or more
    request_seconds: HistogramSnapshot
    segment_seconds: dict[str, HistogramSnapshot]  # all of SEGMENTS
    prompt_tokens: HistogramSnapshot
    output_tokens: HistogramSnapshot  # one a choice
    transfers: dict[str, Transfers]  # by transport: those that were used
    lately: Lately

    @property
    def num_kv_bytes(self) -> int:
        return int(sum(transfers.size_bytes.sum for transfers in self.transfers.values()))


@dataclass(frozen=True, slots=True)
class _Mark:
    """What `lately` is counted from."""

    num_output_tokens: int
    num_finished: int
    ttft: HistogramSnapshot
    itl: HistogramSnapshot


class _Choice:
    """One choice that has tokens."""

    __slots__ = ("first_at", "last_at", "num_tokens")

    def __init__(self, now: float, num_tokens: int) -> None:
        self.first_at = self.last_at = now
        self.num_tokens = num_tokens


class RequestMetrics:
    """An observer that counts. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By id: a request is alive from `started` to `ended`, and its hash would take longer than all the rest.
        self._choices: dict[int, dict[int, _Choice]] = {}
        self._num_started = self._num_whole = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = self._num_finished = 0
        self._num_kv_blocks = self._num_kv_blocks_cached = 0
        self._outcomes: Counter[str] = Counter()
        self._ttft = Histogram(_FIRST_TOKEN_SECONDS)
        self._itl = Histogram(_TOKEN_SECONDS)
        self._tpot = Histogram(_TOKEN_SECONDS)
        self._request = Histogram(_REQUEST_SECONDS)
        self._segments = {name: Histogram(_SEGMENT_SECONDS) for name in SEGMENTS}
        self._prompt_tokens = Histogram(_LENGTHS)
        self._output_tokens = Histogram(_LENGTHS)
        self._transfers: dict[str, tuple[Histogram, Histogram]] = {}
        self._recent = Recent(self._mark, clock.now())

    # --- RequestObserver

    def started(self, request: Request, placement: Placement, trace: TraceContext | None) -> None:
        self._choices[id(request)] = {}
        self._num_started += 1
        self._num_whole += placement.prefill is None
        self._num_prompt_tokens += len(request.prompt_token_ids)
        self._prompt_tokens.observe(len(request.prompt_token_ids))

    def output(self, request: Request, output: Output, now: float) -> None:
        if now >= self._recent.due:
            self._recent.mark(now)
        num_tokens = len(output.token_ids)
        if num_tokens:
            self._num_output_tokens += num_tokens
            choices = self._choices[id(request)]
            choice = choices.get(output.choice)
            if choice is not None:
                self._itl.observe(now - choice.last_at)
                choice.last_at = now
                choice.num_tokens += num_tokens
            else:
                if not choices:
                    self._ttft.observe(now - request.arrival)
                choices[output.choice] = _Choice(now, num_tokens)
        if output.finish_reason is not None:
            self._end_choice(request, output)

    def ended(self, request: Request, outcome: str, timings: Timings, now: float) -> None:
        self._recent.mark(now)
        self._choices.pop(id(request), None)
        name = outcome.lower()
        self._outcomes[name if name in OUTCOMES else OTHER] += 1
        self._request.observe(now - request.arrival)

    def _end_choice(self, request: Request, output: Output) -> None:
        choice = self._choices[id(request)].get(output.choice)
        if choice is not None:
            self._output_tokens.observe(choice.num_tokens)
            if choice.num_tokens > 1:
                self._tpot.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1))
        if output.summary is not None:
            self._finish(output.summary)

    def _finish(self, summary: Summary) -> None:
        self._num_finished += 1
        self._num_cached_tokens += summary.usage.cached_tokens
        for name, histogram in self._segments.items():
            if summary.timings.second_token_ms or name not in _AFTER_FIRST:
                histogram.observe(getattr(summary.timings, f"{name}_ms") / 1e3)
        if summary.handoff is not None:
            report = summary.handoff.report
            self._num_kv_blocks += report.kv_blocks
            self._num_kv_blocks_cached += report.cached_blocks
            transport = report.transport if report.transport in TRANSPORTS else OTHER
            if transport not in self._transfers:
                self._transfers[transport] = (Histogram(_TRANSFER_SECONDS), Histogram(_TRANSFER_BYTES))
            seconds, size_bytes = self._transfers[transport]
            seconds.observe(report.transfer_ms / 1e3)
            size_bytes.observe(report.kv_bytes)

    # --- what others see

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            num_started=self._num_started,
            num_whole=self._num_whole,
            outcomes={outcome: self._outcomes[outcome] for outcome in sorted(OUTCOMES)},
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_kv_blocks=self._num_kv_blocks,
            num_kv_blocks_cached=self._num_kv_blocks_cached,
            ttft_seconds=self._ttft.snapshot(),
            itl_seconds=self._itl.snapshot(),
            tpot_seconds=self._tpot.snapshot(),
            request_seconds=self._request.snapshot(),
            segment_seconds={name: histogram.snapshot() for name, histogram in self._segments.items()},
            prompt_tokens=self._prompt_tokens.snapshot(),
            output_tokens=self._output_tokens.snapshot(),
            transfers={
                transport: Transfers(seconds.snapshot(), size_bytes.snapshot())
                for transport, (seconds, size_bytes) in sorted(self._transfers.items())
            },
            lately=self.lately(),
        )

    def lately(self) -> Lately:
        now = self._clock.now()
        begin, then = self._recent.begin(now)
        mark = self._mark()
        return Lately(
            window_s=now - begin,
            num_output_tokens=mark.num_output_tokens - then.num_output_tokens,
            num_finished=mark.num_finished - then.num_finished,
            ttft_seconds=mark.ttft.since(then.ttft),
            itl_seconds=mark.itl.since(then.itl),
        )

    def _mark(self) -> _Mark:
        return _Mark(self._num_output_tokens, self._num_finished, self._ttft.snapshot(), self._itl.snapshot())
