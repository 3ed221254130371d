"""Which sequences compute how many tokens in the next step, and which blocks they get, lose or share. Pure.

A plan is made in one pass down the ranks, the running before the waiting:

    running   oldest ---------------> youngest   each gets tokens, and a block where it crosses into one; where none is
                                                 left, the youngest below gives way to it: its KV goes to host memory
                                                 if it fits there, else it is computed again
    waiting   oldest ---------------> ...        started in order, none passing another, unless somebody gave way above;
                                                 those swapped out before others of their priority

Old and young are meant by rank: `engine/ranking.py`.
A sequence that finds no room although all below it would give way keeps its blocks and skips the step: somebody above
it, or a transfer, holds the rest and will be done. So the oldest always advances, and each preemption frees a block.
"""

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

from kvrelay.engine.admission import Admission, Terms
from kvrelay.engine.block_pool import BlockPool, Ledger
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.ranking import Ranking
from kvrelay.engine.request import Sequence
from kvrelay.engine.step import Scheduled


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting sequence starts, or one that was swapped out goes on: on these cached blocks, and on so many new ones
    behind them."""

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

    preempted: tuple[Sequence, ...] = ()  # youngest first: what it leaves cached is evicted first
    swapped_out: tuple[Sequence, ...] = ()  # of the preempted, whose KV goes to host memory
    growth: tuple[Growth, ...] = ()
    admitted: tuple[Admitted, ...] = ()  # start to compute
    grants: tuple[Admitted, ...] = ()  # start to wait for another node, which fills their blocks
    scheduled: tuple[Scheduled, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.preempted or self.grants or self.scheduled)


class Planner:
    """One plan in the making: what it takes and gives is on a ledger."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        admission: Admission,
        ranking: Ranking,
        *,
        running: Seq[Sequence],
        waiting: Seq[Sequence],
        seated: Seq[Sequence],
        num_free_host_blocks: int = 0,
    ) -> None:
        """`running` by rank, `waiting` in the order in which they start; `seated`: all that hold blocks and count
        towards max_num_seqs."""
        self._pool = pool
        self._admission = admission
        self._ranking = ranking
        self._running = running
        self._waiting = waiting
        self._seated = seated
        self._ledger = Ledger(pool)
        self._config = config
        self._num_free_host_blocks = num_free_host_blocks
        self._num_tokens_left = config.max_num_batched_tokens
        self._num_seats_left = config.max_num_seqs - sum(map(admission.num_seats, seated))
        self._lacks_tokens = False  # somebody before the one looked at does
        self._preempted: set[Sequence] = set()
        self._growth: dict[Sequence, int] = {}
        self._admitted: list[Admitted] = []
        self._grants: list[Admitted] = []
        self._scheduled: dict[Sequence, Scheduled] = {}

    def result(self) -> StepPlan:
        return StepPlan(
            preempted=tuple(sequence for sequence in reversed(self._running) if sequence in self._preempted),
            swapped_out=tuple(self._swap_out()),
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
            start = sequence.num_computed_tokens
            end = self._chunk_end(sequence, start, max(1, self._num_tokens_left - num_behind))
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
        if self._lacks_tokens and not self._leaves_tokens(num_seats):
            return False
        cached = self._pool.lookup(sequence.block_hashes[: terms.max_cached_blocks])
        num_new_blocks = terms.num_blocks - len(cached)
        self._ledger.acquire(cached)
        if not self._fits(num_new_blocks + num_spare, num_seats):
            lower = [other for other in self._running if self._ranking.may_displace(sequence, other)]
            if not self._make_room(lower, num_new_blocks + num_spare, num_seats):
                return False
        self._ledger.allocate(num_new_blocks)
        self._num_seats_left -= num_seats
        admitted = Admitted(sequence, tuple(cached), num_new_blocks)
        if terms.computes:
            start = max(len(cached) * self._pool.block_size, sequence.num_computed_tokens)
            self._admitted.append(admitted)
            self._schedule(sequence, start, self._chunk_end(sequence, start, self._num_tokens_left))
        else:
            self._grants.append(admitted)
        return True

    def _claim(self, terms: Terms, num_spare: int, num_seats: int) -> bool:
        """Keep the place of a sequence that lacks nothing but tokens of this step: those behind that need none may
        start in what it leaves, as long as they leave it tokens of later steps."""
        self._lacks_tokens = True
        fits = self._fits(terms.num_blocks + num_spare, num_seats)
        self._ledger.allocate(terms.num_blocks)
        self._num_seats_left -= num_seats
        return fits

    def _leaves_tokens(self, num_seats: int) -> bool:
        """Whether a step still has a token for each once so many seats more are taken: else those who pass would land
        and take them all, and so would the next who pass, for ever."""
        num_seats_taken = self._config.max_num_seqs - self._num_seats_left
        return num_seats_taken + num_seats <= self._config.max_num_batched_tokens

    def _num_spare_blocks(self, sequence: Sequence) -> int:
        """The watermark, unless this sequence is the oldest: it never waits for the sake of others."""
        rank = self._ranking.rank(sequence)
        if sequence is not self._waiting[0] or any(self._ranking.rank(other) < rank for other in self._seated):
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
        self._preempted.add(sequence)
        return True

    def _stay(self, sequence: Sequence) -> None:
        """Undo `_give_way`."""
        self._ledger.acquire(sequence.block_table)
        self._ledger.allocate(self._growth.get(sequence, 0))
        self._num_seats_left -= self._admission.num_seats(sequence)
        self._preempted.remove(sequence)

    def _chunk_end(self, sequence: Sequence, start: int, limit: int) -> int:
        """How far a sequence is computed that may have so many tokens of this step."""
        threshold = self._config.long_prefill_token_threshold
        return min(sequence.num_tokens, start + (min(limit, threshold) if threshold else limit))

    def _swap_out(self) -> Iterator[Sequence]:
        """Of those that give way: whose KV fits in host memory as a whole, the highest ranks first."""
        num_left = self._num_free_host_blocks
        for sequence in filter(self._preempted.__contains__, self._running):
            num_blocks = blocks_for(sequence.num_computed_tokens, self._pool.block_size)
            if num_blocks <= num_left:
                num_left -= num_blocks
                yield sequence

    def _schedule(self, sequence: Sequence, start: int, end: int) -> None:
        self._scheduled[sequence] = Scheduled(sequence, start, end)
        self._num_tokens_left -= end - start

    def _unschedule(self, sequence: Sequence) -> None:
        """Take back what this plan had for a sequence that is preempted after all."""
        self._growth.pop(sequence, None)
        row = self._scheduled.pop(sequence, None)
        if row is not None:
            self._num_tokens_left += row.num_new_tokens
