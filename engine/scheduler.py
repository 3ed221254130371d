"""Which sequences compute how many tokens in the next step, and which blocks they get, lose or share.

There is no prefill and no decode phase: num_computed_tokens catches up with num_tokens. `plan` decides and changes
nothing; `apply` carries the plan out, before anything else may change; after the step `advance` takes in what was
computed. Knows no network and no tensor; what differs between roles is the admission policy.

A plan is made in one pass down the ranks, the running before the waiting:

    running   oldest ---------------> youngest   each gets tokens, and a block where it crosses into one; where none is
                                                 left, the youngest below gives way to it and is recomputed later
    waiting   oldest ---------------> ...        started in order, none passing another, unless somebody gave way above

A sequence that finds no room although all below it would give way keeps its blocks and skips the step: somebody above
it, or a transfer, holds the rest and will be done. So the oldest always advances, and each preemption frees a block.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, replace
from operator import attrgetter

from kvrelay.engine.admission import Admission, Terms
from kvrelay.engine.block_hash import extend_block_hashes, root_hash
from kvrelay.engine.block_pool import BlockPool, Ledger
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import TooLarge
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import OutputToken, Request, Sequence, Status
from kvrelay.engine.step import Scheduled

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting sequence starts: on these cached blocks, and on so many new ones behind them."""

    sequence: Sequence
    cached_block_ids: tuple[int, ...]
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A running sequence gets new blocks."""

    sequence: Sequence
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does. Empty: there is nothing to do until something changes from outside."""

    preempted: tuple[Sequence, ...] = ()
    growth: tuple[Growth, ...] = ()
    admitted: tuple[Admitted, ...] = ()  # start to compute
    grants: tuple[Admitted, ...] = ()  # start to wait for another node, which fills their blocks
    scheduled: tuple[Scheduled, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.preempted or self.grants or self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """A snapshot, and counters since the start."""

    num_running: int
    num_waiting: int
    num_remote: int = 0  # granted, and not yet landed
    num_expected: int = 0  # called for, and not yet offered
    num_preemptions: int
    num_prefix_queries: int  # tokens of all starts
    num_prefix_hits: int  # of these, found in the prefix cache


class Scheduler:
    """The queue, the running, and their blocks. Owned by the engine thread."""

    def __init__(self, config: EngineConfig, pool: BlockPool, admission: Admission) -> None:
        self.config = config
        self.pool = pool
        self.admission = admission
        self.waiting: list[Sequence] = []  # by rank, without blocks, block_hashes complete
        self.running: list[Sequence] = []  # by rank
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0

    def check_fits(self, request: Request) -> None:
        """Raises: TooLarge, with the numbers, for what could not run even with the node to itself."""
        num_seats = self.admission.num_seats(Sequence(request))
        if num_seats > self.config.max_num_seqs:
            raise TooLarge("n", num_seats, f"this node runs {self.config.max_num_seqs} sequences at once")
        most = self.admission.most_blocks(request)
        if most > self.pool.num_blocks:
            raise TooLarge(
                "num_tokens",
                request.num_tokens,
                f"with max_tokens = {request.sampling.max_tokens} and n = {request.sampling.n} it takes up to {most} "
                f"KV blocks of {self.pool.block_size} tokens; this node has {self.pool.num_blocks}",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence at its rank.

        Raises: TooLarge.
        """
        self.check_fits(sequence.request)
        self._enqueue(sequence)

    def plan(self) -> StepPlan:
        """Decide the next step. Pure."""
        planner = _Planner(self)
        planner.schedule_running()
        planner.admit_waiting()
        return planner.result()

    def apply(self, plan: StepPlan) -> tuple[Scheduled, ...]:
        """Carry a plan out: afterwards each block table covers what is scheduled."""
        for sequence in plan.preempted:
            self._preempt(sequence)
        starts = (*plan.admitted, *plan.grants)
        for start in starts:
            self.pool.acquire(start.cached_block_ids)  # before anything is allocated: that evicts
        for growth in plan.growth:
            growth.sequence.block_table += self.pool.allocate(growth.num_new_blocks)
        for start in starts:
            self._start(start)
        for start in plan.admitted:
            self._run(start.sequence)
        for start in plan.grants:
            self._grant(start.sequence)
        return plan.scheduled

    def advance(self, scheduled: Iterable[Scheduled]) -> None:
        """Take in rows whose KV is computed: their full blocks can be found from now on. Never a row that failed."""
        for row in scheduled:
            row.sequence.num_computed_tokens = row.end
            self._publish(row.sequence, row.start, row.end)

    def fork(self, sequence: Sequence, tokens: Seq[OutputToken]) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Go on from a running sequence, whose tokens are all computed, with one sequence for each of these tokens: of
        the choices that it stands for, in order, all or some.

        They share its full blocks. Each has one block of its own, for the rest of the prompt and its next token; the
        rest is still to be copied there, before the next step.
        Returns: the sequences, the first of which is `sequence`, and each block to copy as (from, to).
        """
        num_shared, num_left = divmod(sequence.num_tokens, self.pool.block_size)
        shared, own = sequence.block_table[:num_shared], sequence.block_table[num_shared:]
        sequences = [sequence]
        for token, block_id in zip(tokens[1:], own[1:], strict=False):
            self.pool.acquire(shared)
            other = replace(
                sequence,
                choice=token.choice,
                token_ids=[*sequence.token_ids, token.token_id],
                block_table=[*shared, block_id],
                block_hashes=list(sequence.block_hashes),
            )
            sequences.append(other)
            self._run(other)
        self.pool.release(own[len(tokens) :])  # of choices that go no further
        sequence.block_table = [*shared, own[0]]
        sequence.choice = tokens[0].choice  # its place among the running stays the same
        sequence.token_ids.append(tokens[0].token_id)
        copies = [(own[0], block_id) for block_id in own[1 : len(tokens)]] if num_left else []
        return sequences, copies

    def finish(self, sequence: Sequence) -> None:
        """End a sequence that has all it was to have."""
        self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence wherever it is, and take its blocks back. Does nothing to one that has ended."""
        if sequence.status is Status.RUNNING:
            _remove(self.running, sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            _remove(self.waiting, sequence)
        sequence.status = Status.FINISHED

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
        )

    def seated(self) -> list[Sequence]:
        """Those that hold blocks and count towards max_num_seqs."""
        return self.running

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_rank)

    def _grant(self, sequence: Sequence) -> None:
        raise AssertionError(f"{sequence.key} waits for KV, and nobody here receives any")

    def _enqueue(self, sequence: Sequence) -> None:
        self._extend_hashes(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_rank)

    def _start(self, start: Admitted) -> None:
        sequence = start.sequence
        _remove(self.waiting, sequence)
        sequence.block_table = [*start.cached_block_ids, *self.pool.allocate(start.num_new_blocks)]
        num_cached_tokens = len(start.cached_block_ids) * self.pool.block_size
        sequence.num_computed_tokens = num_cached_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached_tokens
        self._num_prefix_queries += sequence.num_tokens
        self._num_prefix_hits += num_cached_tokens

    def _preempt(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._enqueue(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def _publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Let the blocks be found that the tokens [start, end) have filled."""
        first, last = start // self.pool.block_size, end // self.pool.block_size
        if first == last or not self.pool.prefix_caching:
            return
        self._extend_hashes(sequence)
        for index in range(first, last):
            self.pool.publish(sequence.block_table[index], sequence.block_hashes[index])

    def _extend_hashes(self, sequence: Sequence) -> None:
        if self.pool.prefix_caching:
            root = root_hash(sequence.request.cache_salt)
            extend_block_hashes(sequence.block_hashes, sequence.token_ids, self.pool.block_size, root)


class _Planner:
    """One plan in the making: what it takes and gives is on a ledger."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._pool = scheduler.pool
        self._admission = scheduler.admission
        self._running = scheduler.running
        self._waiting = scheduler.waiting
        self._seated = scheduler.seated()
        self._ledger = Ledger(scheduler.pool)
        self._num_tokens_left = scheduler.config.max_num_batched_tokens
        self._num_seats_left = scheduler.config.max_num_seqs - sum(map(self._admission.num_seats, self._seated))
        self._preempted: dict[Sequence, None] = {}
        self._growth: dict[Sequence, int] = {}
        self._admitted: list[Admitted] = []
        self._grants: list[Admitted] = []
        self._scheduled: dict[Sequence, Scheduled] = {}

    def result(self) -> StepPlan:
        return StepPlan(
            preempted=tuple(self._preempted),
            growth=tuple(Growth(sequence, num_blocks) for sequence, num_blocks in self._growth.items()),
            admitted=tuple(self._admitted),
            grants=tuple(self._grants),
            scheduled=tuple(self._scheduled.values()),
        )

    def schedule_running(self) -> None:
        for index, sequence in enumerate(self._running):
            if self._num_tokens_left == 0:
                return
            if sequence in self._preempted:
                continue
            num_behind = len(self._running) - index - 1
            # Each one behind is left a token: a long prompt does not hold up those that decode.
            start, limit = sequence.num_computed_tokens, max(1, self._num_tokens_left - num_behind)
            end = min(sequence.num_tokens, start + limit)
            num_new_blocks = blocks_for(end, self._pool.block_size) - len(sequence.block_table)
            if num_new_blocks > 0:
                if not self._fits(num_new_blocks) and not self._make_room(self._running[index + 1 :], num_new_blocks):
                    continue
                self._ledger.allocate(num_new_blocks)
                self._growth[sequence] = num_new_blocks
            self._schedule(sequence, start, end)

    def admit_waiting(self) -> None:
        for sequence in self._waiting:
            # Room that somebody gave way for is not for the next in the queue.
            if self._preempted or not self._admit(sequence):
                return

    def _admit(self, sequence: Sequence) -> bool:
        """Start a sequence, or say that nobody behind it may start either."""
        terms, num_seats = self._admission.terms(sequence), self._admission.num_seats(sequence)
        num_spare = self._num_spare_blocks(sequence)
        if terms.computes and self._num_tokens_left == 0:
            return self._claim(terms, num_spare, num_seats)
        cached = self._pool.lookup(sequence.block_hashes[: terms.max_cached_blocks])
        num_new_blocks = terms.num_blocks - len(cached)
        self._ledger.acquire(cached)
        if not self._fits(num_new_blocks + num_spare, num_seats):
            lower = [other for other in self._running if other.request.priority > sequence.request.priority]
            if not self._make_room(lower, num_new_blocks + num_spare, num_seats):
                self._ledger.release(cached)
                return False
        self._ledger.allocate(num_new_blocks)
        self._num_seats_left -= num_seats
        admitted = Admitted(sequence, tuple(cached), num_new_blocks)
        if terms.computes:
            start = len(cached) * self._pool.block_size
            self._admitted.append(admitted)
            self._schedule(sequence, start, min(sequence.num_tokens, start + self._num_tokens_left))
        else:
            self._grants.append(admitted)
        return True

    def _claim(self, terms: Terms, num_spare: int, num_seats: int) -> bool:
        """Keep the place of a sequence that lacks nothing but tokens of this step: those behind that need none may
        start in what it leaves."""
        fits = self._fits(terms.num_blocks + num_spare, num_seats)
        self._ledger.allocate(terms.num_blocks)
        self._num_seats_left -= num_seats
        return fits

    def _num_spare_blocks(self, sequence: Sequence) -> int:
        """The watermark, unless this sequence is the oldest: it never waits for the sake of others."""
        rank = sequence.rank
        if self._admitted or self._grants or any(other.rank < rank for other in self._seated):
            return self._admission.watermark_blocks(self._pool.num_blocks)
        return 0

    def _fits(self, num_blocks: int, num_seats: int = 0) -> bool:
        return self._ledger.num_free >= num_blocks and self._num_seats_left >= num_seats

    def _make_room(self, candidates: Seq[Sequence], num_blocks: int, num_seats: int = 0) -> bool:
        """Preempt as few of the candidates as give the room, the lowest ranks first; none if all would not do.

        One whose blocks others hold too (sharers, a transfer) would free nothing and is passed over.
        """
        victims: list[Sequence] = []
        for candidate in reversed(candidates):
            if self._fits(num_blocks, num_seats):
                break
            if candidate not in self._preempted and self._give_way(candidate):
                victims.append(candidate)
        enough = self._fits(num_blocks, num_seats)
        for victim in reversed(victims):
            self._stay(victim)
            if enough and not self._fits(num_blocks, num_seats):
                self._give_way(victim)
        for victim in victims:
            if victim in self._preempted:
                self._unschedule(victim)
        return enough

    def _give_way(self, sequence: Sequence) -> bool:
        """Count a sequence as preempted; not if that would free no block."""
        if self._ledger.release(sequence.block_table) == 0:
            self._ledger.acquire(sequence.block_table)
            return False
        self._ledger.allocate(-self._growth.get(sequence, 0))
        self._num_seats_left += self._admission.num_seats(sequence)
        self._preempted[sequence] = None
        return True

    def _stay(self, sequence: Sequence) -> None:
        """Undo `_give_way`."""
        self._ledger.acquire(sequence.block_table)
        self._ledger.allocate(self._growth.get(sequence, 0))
        self._num_seats_left -= self._admission.num_seats(sequence)
        del self._preempted[sequence]

    def _schedule(self, sequence: Sequence, start: int, end: int) -> None:
        self._scheduled[sequence] = Scheduled(sequence, start, end)
        self._num_tokens_left -= end - start

    def _unschedule(self, sequence: Sequence) -> None:
        """Take back what this plan had for a sequence that is preempted after all."""
        self._growth.pop(sequence, None)
        row = self._scheduled.pop(sequence, None)
        if row is not None:
            self._num_tokens_left += row.num_new_tokens


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(sequences, sequence.rank, key=_rank)
    assert sequences[index : index + 1] == [sequence], f"{sequence.key} is not where its status says"
    del sequences[index]
