"""What the live page is told: nodes and the last requests, as snapshots and what has changed between two of them.

No text of a prompt or an answer is in here, no id a client chose, and no list that load makes longer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import ResourceExhausted
from kvrelay.engine.legs import TraceContext
from kvrelay.engine.request import Request
from kvrelay.router.api import Handoff, Output, Timings
from kvrelay.router.node_statistics import BlockStatistics, TransferStatistics
from kvrelay.router.policy import Placement
from kvrelay.router.registry import Node

MAX_LIVES = 256  # requests that are kept: running ones, and those that ended last
MAX_WATCHERS = 16
TICK_S = 0.25  # at most so often
_POLL_S = 1.0  # nodes report once a second, and tell nobody here
_HEARTBEAT_S = 10.0
_MAX_GAPS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """One request's bar. Moments are seconds on the feed's clock, which `Snapshot.now_s` reads too."""

    arrival_s: float
    prefill: str  # names; empty where there was none, or none yet
    decode: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    placed_s: float | None
    first_s: float | None
    ended_s: float | None
    outcome: str  # empty while it runs; a finish reason, an error's code, or LEFT
    timings: Timings | None
    handoff: Handoff | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """One node as it last said of itself."""

    name: str
    role: str
    draining: bool
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_quarantined: int
    num_running: int
    num_waiting: int
    num_transfers: int  # that last now
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters since the router's start, and the gaps between tokens of late."""

    num_running: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_left: int = 0
    num_tokens: int = 0
    num_kv_bytes: int = 0
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a page shows."""

    now_s: float = 0.0
    nodes: Mapping[str, LiveNode] = field(default_factory=dict)  # by epoch
    requests: Mapping[str, LiveRequest] = field(default_factory=dict)  # by a number of the feed's own
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What makes a newer snapshot of an older one: entries that are new or others now, None for those that are gone."""

    now_s: float
    nodes: Mapping[str, LiveNode | None]
    requests: Mapping[str, LiveRequest | None]
    totals: Totals

    def __bool__(self) -> bool:
        """Whether anything but the time has changed."""
        return bool(self.nodes or self.requests)


def changes(old: Snapshot, new: Snapshot) -> Change:
    """Pure. Gaps between tokens alone are no change."""
    return Change(
        now_s=new.now_s,
        nodes=_differences(old.nodes, new.nodes),
        requests=_differences(old.requests, new.requests),
        totals=new.totals,
    )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: entry for name, entry in new.items() if entry is not (was := old.get(name)) and entry != was}
    return found | {name: None for name in old if name not in new}


@dataclass(slots=True, eq=False)
class _Life:
    """One request, from its start to the last that is known of it."""

    number: str
    arrival_s: float
    num_prompt_tokens: int
    prefill: str = ""
    decode: str = ""
    placed_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    handoff: Handoff | None = None
    ended: LiveRequest | None = None  # made once: nothing changes any more

    def shown(self, ended_s: float | None = None, outcome: str = "", timings: Timings | None = None) -> LiveRequest:
        return self.ended or LiveRequest(
            arrival_s=self.arrival_s,
            prefill=self.prefill,
            decode=self.decode,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_tokens=self.num_tokens,
            placed_s=self.placed_s,
            first_s=self.first_s,
            ended_s=ended_s,
            outcome=outcome,
            timings=timings,
            handoff=self.handoff,
        )


class LiveFeed:
    """Observes every request and tells those who watch. Belongs to the event loop.

    Without watchers a token costs a counter or two. Of requests that all run at once, those above MAX_LIVES are counted
    and not shown.
    """

    def __init__(self, nodes: Iterable[Node], clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._origin = clock.now()
        self._lives: dict[str, _Life] = {}  # by the request's id inside
        self._ended: deque[str] = deque()  # those of them that have, oldest first
        self._num_lives = 0
        self._watchers: set[asyncio.Event] = set()
        self._gaps: deque[float] = deque(maxlen=_MAX_GAPS)
        self._running: set[str] = set()  # ids of all that run, shown or not
        self._num_finished = self._num_failed = self._num_left = 0
        self._num_tokens = self._num_kv_bytes = 0

    # --- RequestObserver

    def started(self, request: Request, placement: Placement, trace: TraceContext | None) -> None:
        request_id = request.key.request_id
        is_new = request_id not in self._running
        self._running.add(request_id)
        life = self._open(request) if is_new else self._lives.get(request_id)
        if life is not None:  # again, on other nodes: an attempt that goes on where another left off
            life.prefill = "" if placement.prefill is None else placement.prefill.facts.name
            life.decode = placement.decode.facts.name
            life.placed_s = self._clock.now() - self._origin
        self._wake()

    def output(self, request: Request, output: Output, now: float) -> None:
        num_tokens = len(output.token_ids)
        self._num_tokens += num_tokens
        life = self._lives.get(request.key.request_id)
        if life is not None:
            life.num_tokens += num_tokens
            if life.first_s is None and num_tokens:
                life.first_s = now - self._origin
            if output.summary is not None:
                life.num_cached_tokens = output.summary.usage.cached_tokens
                life.handoff = output.summary.handoff
        if output.summary is not None and output.summary.handoff is not None:
            self._num_kv_bytes += output.summary.handoff.report.kv_bytes
        if self._watchers:
            if life is not None and num_tokens and request.sampling.n == 1:
                if life.last_s:
                    self._gaps.append((now - life.last_s) * 1e3)
                life.last_s = now
            self._wake()

    def ended(self, request: Request, outcome: str, timings: Timings, now: float) -> None:
        request_id = request.key.request_id
        was_placed = request_id in self._running
        self._running.discard(request_id)
        life = self._lives.get(request_id) if was_placed else self._open(request)
        if life is not None:
            life.ended = life.shown(now - self._origin, outcome, timings)
            self._ended.append(request_id)
        self._num_left += outcome == "LEFT"
        self._num_finished += outcome in ("stop", "length")
        self._num_failed += outcome not in ("LEFT", "stop", "length")
        self._wake()

    # --- those who watch

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def snapshot(self) -> Snapshot:
        """As of now."""
        gaps = sorted(self._gaps)
        return Snapshot(
            now_s=self._clock.now() - self._origin,
            nodes={node.facts.epoch: _shown_node(node) for node in self._nodes},
            requests={life.number: life.shown() for life in self._lives.values()},
            totals=Totals(
                num_running=len(self._running),
                num_finished=self._num_finished,
                num_failed=self._num_failed,
                num_left=self._num_left,
                num_tokens=self._num_tokens,
                num_kv_bytes=self._num_kv_bytes,
                itl_p50_ms=_quantile(gaps, 0.5),
                itl_p95_ms=_quantile(gaps, 0.95),
            ),
        )

    async def watch(self) -> AsyncGenerator[Change | None]:
        """A first change from nothing, then one whenever there is any, at most one a TICK_S; None: a sign of life.

        Whoever takes long for one gets the newest state next: nothing is queued. To be closed (`aclosing`).
        Raises: ResourceExhausted if there are too many that watch.
        """
        with self._watching() as woken:
            seen = Snapshot()
            said_at = self._clock.now()
            yield changes(seen, seen := self.snapshot())
            while True:
                await asyncio.sleep(TICK_S)
                try:
                    async with asyncio.timeout(_POLL_S):
                        await woken.wait()
                except TimeoutError:
                    pass
                woken.clear()
                change = changes(seen, seen := self.snapshot())
                if change:
                    said_at = self._clock.now()
                    yield change
                elif self._clock.now() - said_at >= _HEARTBEAT_S:
                    said_at = self._clock.now()
                    yield None

    @contextmanager
    def _watching(self) -> Any:
        if len(self._watchers) >= MAX_WATCHERS:
            raise ResourceExhausted(f"{MAX_WATCHERS} watch already")
        if not self._watchers:
            self._gaps.clear()
            for life in self._lives.values():
                life.last_s = 0.0  # a gap over which nobody watched is none
        woken = asyncio.Event()
        self._watchers.add(woken)
        try:
            yield woken
        finally:
            self._watchers.remove(woken)

    def _wake(self) -> None:
        for woken in self._watchers:
            woken.set()

    def _open(self, request: Request) -> _Life | None:
        """Keep a request, in place of the one that ended first, if there has to be room."""
        if len(self._lives) >= MAX_LIVES:
            if not self._ended:
                return None
            del self._lives[self._ended.popleft()]
        self._num_lives += 1
        life = _Life(str(self._num_lives), request.arrival - self._origin, len(request.prompt_token_ids))
        self._lives[request.key.request_id] = life
        return life


def _shown_node(node: Node) -> LiveNode:
    # A load comes with every step, statistics once a second: what is cached and quarantined is as old as they are.
    said = node.statistics
    blocks = BlockStatistics() if said is None else said.blocks
    transfers = TransferStatistics() if said is None else said.transfers
    num_blocks = node.facts.num_blocks
    num_available = max(0, min(node.load.num_free_blocks, num_blocks))
    num_cached = min(blocks.cached, num_available)
    num_quarantined = min(blocks.quarantined, num_blocks - num_available)
    return LiveNode(
        name=node.facts.name,
        role=node.facts.role.value,
        draining=node.draining,
        num_blocks=num_blocks,
        num_free=num_available - num_cached,
        num_cached=num_cached,
        num_held=num_blocks - num_available - num_quarantined,
        num_quarantined=num_quarantined,
        num_running=node.load.num_running,
        num_waiting=node.load.num_waiting,
        num_transfers=sum(transfers.states.values()),
        tokens_per_s=round(node.load.tokens_per_s, 1),
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
