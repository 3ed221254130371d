"""The queue, the running and their blocks: carries plans out, and takes in what steps computed.

There is no prefill and no decode phase: num_computed_tokens catches up with num_tokens. `plan` decides and changes
nothing (`engine/planner.py`); `apply` carries the plan out, before anything else may change; after the step `advance`
takes in what was computed. Knows no network and no tensor; what differs between roles is the admission policy.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace

from kvrelay.engine.admission import Admission
from kvrelay.engine.block_hash import extend_block_hashes, root_hash
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import TooLarge
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.planner import Admitted, Planner, StepPlan
from kvrelay.engine.ranking import Ranking
from kvrelay.engine.request import OutputToken, Request, Sequence, Status
from kvrelay.engine.step import Applied, Scheduled, Swap
from kvrelay.engine.swap_space import SwapSpace, SwapStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """A snapshot, and counters since the start."""

    num_running: int
    num_waiting: int  # those swapped out among them
    num_remote: int = 0  # granted, and not yet landed
    num_expected: int = 0  # called for, and not yet offered
    num_preemptions: int
    num_prefix_queries: int  # tokens of all starts
    num_prefix_hits: int  # of these, found in the prefix cache
    swap: SwapStatistics


class Scheduler:
    """The queue, the running, and their blocks. Owned by the engine thread."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, admission: Admission, *, num_host_blocks: int = 0
    ) -> None:
        """`num_host_blocks`: the executor's room for the KV of those that give way."""
        self.config = config
        self.pool = pool
        self.admission = admission
        self.ranking = Ranking(config.priority_ageing_s)
        self.waiting: list[Sequence] = []  # by rank, without blocks, block_hashes complete
        self.swapped: list[Sequence] = []  # by rank, without blocks, their KV in host memory
        self.running: list[Sequence] = []  # by rank
        self.swap_space = SwapSpace(num_host_blocks)
        self._num_preemptions = 0
        self._num_swapped_out = 0
        self._num_swapped_in = 0
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
        planner = Planner(
            self.config,
            self.pool,
            self.admission,
            self.ranking,
            running=self.running,
            waiting=list(self._in_turn()),
            seated=self.seated(),
            num_free_host_blocks=self.swap_space.num_free,
        )
        planner.schedule_running()
        planner.admit_waiting()
        return planner.result()

    def apply(self, plan: StepPlan) -> Applied:
        """Carry a plan out: afterwards each block table covers what is scheduled."""
        swap_outs = []
        for sequence in plan.preempted:
            sequence.num_preemptions += 1
            self._num_preemptions += 1
            if sequence in plan.swapped_out:
                swap_outs.append(self._swap_out(sequence))
            else:
                self.recompute(sequence)
        starts = (*plan.admitted, *plan.grants)
        for start in starts:
            self.pool.acquire(start.cached_block_ids)  # before anything is allocated: that evicts
        for growth in plan.growth:
            growth.sequence.block_table += self.pool.allocate(growth.num_new_blocks)
        swap_ins = [swap for start in starts if (swap := self._start(start))]
        for start in plan.admitted:
            self._run(start.sequence)
        for start in plan.grants:
            self._grant(start.sequence)
        return Applied(tuple(swap_outs), tuple(swap_ins), plan.scheduled)

    def restored(self, sequence: Sequence) -> None:
        """The KV of a sequence that was swapped out is in its blocks again, and can be found there."""
        self._publish(sequence, 0, sequence.num_computed_tokens)

    def recompute(self, sequence: Sequence) -> None:
        """A running or swapped sequence gives up its KV, and waits to be computed again."""
        self._take_off(sequence)
        sequence.num_computed_tokens = 0
        self._enqueue(sequence)

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
                matcher=sequence.matcher and sequence.matcher.fork(),
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
        self._take_off(sequence)
        sequence.status = Status.FINISHED

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.swapped),
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            swap=SwapStatistics(
                num_host_blocks=self.swap_space.num_blocks,
                num_free_host_blocks=self.swap_space.num_free,
                num_swapped=len(self.swapped),
                num_swapped_out=self._num_swapped_out,
                num_swapped_in=self._num_swapped_in,
            ),
        )

    def seated(self) -> list[Sequence]:
        """Those that hold blocks and count towards max_num_seqs."""
        return self.running

    def _in_turn(self) -> Iterator[Sequence]:
        """Who starts next: those that were swapped out, which go on at once and give host memory back, and before them
        only whoever might have had them preempted."""
        swapped, waiting = deque(self.swapped), deque(self.waiting)
        while swapped and waiting:
            yield (waiting if self.ranking.may_displace(waiting[0], swapped[0]) else swapped).popleft()
        yield from swapped
        yield from waiting

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=self.ranking.rank)

    def _grant(self, sequence: Sequence) -> None:
        raise AssertionError(f"{sequence.key} waits for KV, and nobody here receives any")

    def _enqueue(self, sequence: Sequence) -> None:
        self._extend_hashes(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=self.ranking.rank)

    def _start(self, start: Admitted) -> Swap | None:
        """Returns: how the KV comes back that was swapped out."""
        sequence = start.sequence
        sequence.block_table = [*start.cached_block_ids, *self.pool.allocate(start.num_new_blocks)]
        if sequence.status is Status.SWAPPED:
            return self._swap_in(sequence, len(start.cached_block_ids))
        _remove(self.waiting, sequence)
        num_cached_tokens = len(start.cached_block_ids) * self.pool.block_size
        sequence.num_computed_tokens = num_cached_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached_tokens
        self._num_prefix_queries += sequence.num_tokens
        self._num_prefix_hits += num_cached_tokens
        return None

    def _swap_out(self, sequence: Sequence) -> Swap:
        """All that it has computed goes to host memory, shared blocks too: whoever shares them may end before it."""
        num_blocks = blocks_for(sequence.num_computed_tokens, self.pool.block_size)
        host_block_ids = self.swap_space.allocate(num_blocks)
        copies = tuple(zip(sequence.block_table, host_block_ids, strict=False))
        self._take_off(sequence)
        sequence.host_block_ids = host_block_ids
        sequence.status = Status.SWAPPED
        insort(self.swapped, sequence, key=self.ranking.rank)
        self._num_swapped_out += 1
        return Swap(sequence, copies)

    def _swap_in(self, sequence: Sequence, num_cached_blocks: int) -> Swap:
        """What the prefix cache does not hold comes back; its first blocks may never have left the pool."""
        copies = tuple(zip(sequence.host_block_ids, sequence.block_table, strict=False))[num_cached_blocks:]
        _remove(self.swapped, sequence)
        self._release_host_blocks(sequence)
        self._num_swapped_in += 1
        return Swap(sequence, copies)

    def _take_off(self, sequence: Sequence) -> None:
        """Take a sequence from wherever it is, and what it holds back."""
        if sequence.status is Status.RUNNING:
            _remove(self.running, sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            _remove(self.waiting, sequence)
        elif sequence.status is Status.SWAPPED:
            _remove(self.swapped, sequence)
            self._release_host_blocks(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def _release_host_blocks(self, sequence: Sequence) -> None:
        self.swap_space.release(sequence.host_block_ids)
        sequence.host_block_ids = ()

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


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    assert sequence in sequences, f"{sequence.key} is not where its status says"
    sequences.remove(sequence)
