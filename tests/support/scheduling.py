"""A world for schedulers: it executes plans without a model, and checks after every move that nothing is amiss.

Its KV cache is a dict of slots. What a slot should hold depends on every token up to its position and on the salt, as
real KV does; each row's whole context is compared before it is computed, so a block that is shared, evicted, freed or
written wrongly is noticed by whoever reads it. Beside the scheduler runs a naive one: after every move both agree.
"""

from collections import Counter
from collections.abc import Iterable, Sequence as Seq
from itertools import count
from typing import Any
from zlib import crc32

from support.naive_scheduler import NaiveScheduler, Role
from support.naive_twin import check_agrees, in_names, naive_sequence, name_of, rules_of

from kvrelay.connector.base import GrantPlan
from kvrelay.decode_node.admission import grant_plan
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import TooLarge
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import FinishReason, OutputToken, Request, RequestKey, SamplingParams, Sequence, Status
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.step import Applied, Scheduled
from kvrelay.prefill_node.admission import PrefillAdmission

BLOCK_SIZE = 4
_GARBAGE = -1


def make_sequence(
    prompt: Iterable[int], *, number: int = 0, max_tokens: int = 8, priority: int = 0, cache_salt: str = "", n: int = 1
) -> Sequence:
    """A sequence that arrived `number`-th."""
    request = Request(
        key=RequestKey(f"request-{number}", 0),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, n=n),
        priority=priority,
        arrival=float(number),
        cache_salt=cache_salt,
    )
    return Sequence(request)


def make_config(
    *, max_num_seqs: int = 64, max_num_batched_tokens: int = 64, watermark: float = 0.0, **others: Any
) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, watermark=watermark, **others
    )


class World:
    """One node's scheduler, its sequences, its transfers and its slots of KV."""

    role: Role = "local"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.pool
        self.naive = NaiveScheduler(rules_of(scheduler, self.role))
        self.sequences: list[Sequence] = []  # in order of arrival or fork, the ended ones too
        self.expected: list[Sequence] = []
        self.remote: dict[Sequence, GrantPlan] = {}
        self.ended_remote: dict[Sequence, GrantPlan] = {}
        self.num_steps = 0
        self._numbers = count()
        self._slots: dict[tuple[int, int], int] = {}
        self._host_slots: dict[tuple[int, int], int] = {}
        self._num_computed: dict[Sequence, int] = {}  # of those swapped out
        self._chains: dict[Sequence, list[int]] = {}

    # --- what may happen

    def arrive(self, prompt: Iterable[int], *, remote: bool = False, **options: Any) -> Sequence:
        """A request comes in; `remote`: on a decode node, for its second leg. Raises what the scheduler raises."""
        sequence = make_sequence(prompt, number=next(self._numbers), **options)
        sampling = sequence.request.sampling
        fits = self.naive.can_ever_fit(sequence.num_tokens, sampling.max_tokens, sampling.n)
        try:
            if remote:
                self._decode.expect(sequence)
                self.expected.append(sequence)
            else:
                self.scheduler.add(sequence)
        except TooLarge:
            assert not fits, "what could run is refused"
            raise
        assert fits, "what can never run is not refused"
        self.sequences.append(sequence)
        self.naive.arrive(naive_sequence(sequence, remote=remote))
        return sequence

    def offer(self, sequence: Sequence) -> None:
        self.expected.remove(sequence)
        self._decode.offered(sequence)
        self.naive.offer(name_of(sequence))

    def land(self, sequence: Sequence) -> None:
        """The transfer has written what was granted, and ends; well, unless every first token was a last one."""
        granted = self.remote.pop(sequence)
        self._write_granted(sequence, granted)
        tokens = self._sample(sequence)
        if all(token.finish_reason for token in tokens):
            self._decode.give_back(sequence)
            self.naive.fail(name_of(sequence))
        else:
            self._decode.landed(sequence)
            self.naive.land(name_of(sequence))
            self._take(sequence, tokens)

    def fail(self, sequence: Sequence) -> None:
        """The transfer ends without landing; to the very end it may have written."""
        self._scribble(self.remote.pop(sequence))
        self._decode.give_back(sequence)
        self.naive.fail(name_of(sequence))

    def cancel(self, sequence: Sequence) -> None:
        if sequence in self.expected:
            self.expected.remove(sequence)
        if sequence in self.remote:
            self.ended_remote[sequence] = self.remote.pop(sequence)
        if sequence.status is not Status.FINISHED:
            self.naive.cancel(name_of(sequence))
        self.scheduler.abort(sequence)

    def end_transfer(self, sequence: Sequence) -> None:
        """The last write of a cancelled transfer has been made."""
        self._scribble(self.ended_remote.pop(sequence))
        self._decode.give_back(sequence)
        self.naive.unpin(name_of(sequence))

    def step(self) -> StepPlan:
        """Plan, check, apply, compute, advance, sample."""
        before = fingerprint(self)
        plan = self.scheduler.plan()
        assert plan == self.scheduler.plan(), "planning twice gives two plans"
        assert fingerprint(self) == before, "planning changed something"
        decision = self.naive.decide()
        assert in_names(plan) == decision
        self._check_plan(plan)
        applied = self.scheduler.apply(plan)
        scheduled = applied.scheduled
        self._swap(applied)
        for start in plan.grants:
            assert start.sequence.num_preemptions == 0, "it had landed already"
            self.remote[start.sequence] = grant_plan(start.sequence, self.pool.block_size)
        self.naive.carry_out(decision)
        self._check_applied(plan)
        self._started(plan)
        self._compute(scheduled)
        self.scheduler.advance(scheduled)
        self.naive.advance(decision)
        for row in scheduled:
            if row.samples:
                self._take(row.sequence, self._sample(row.sequence))
        self.num_steps += 1
        self.check()
        return plan

    def finish_all(self) -> None:
        """Let every transfer end and every sequence run to its end, in a bounded number of steps."""
        limit = self.num_steps + 100 + 10 * sum(_final_length(sequence) for sequence in self.sequences)
        self.end_transfers()
        while self.live():
            assert self.num_steps < limit, f"no end after {self.num_steps} steps"
            plan = self.step()
            assert not plan.is_empty, "there is work, and no transfer to wait for, but nothing is planned"
            self.end_transfers()
        self.check()
        assert self.pool.counts().owned == 0
        assert self.pool.counts().quarantined == 0
        assert self.scheduler.swap_space.num_free == self.scheduler.swap_space.num_blocks

    def end_transfers(self) -> None:
        for sequence in list(self.expected):
            self.offer(sequence)
        for sequence in list(self.remote):
            self.land(sequence)
        for sequence in list(self.ended_remote):
            self.end_transfer(sequence)

    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]

    # --- what must hold

    def held_by_transfers(self) -> list[int]:
        """Block ids with one entry for each reference that a transfer holds."""
        return [b for sequence in (*self.remote, *self.ended_remote) for b in sequence.block_table]

    def check(self) -> None:
        """The scheduler's and the pool's invariants between two moves."""
        scheduler, pool = self.scheduler, self.pool
        pool.check_integrity()
        counts = pool.counts()
        assert counts.free + counts.cached + counts.owned + counts.quarantined == counts.total == pool.num_blocks
        references = Counter(b for sequence in scheduler.running for b in sequence.block_table)
        references.update(self.held_by_transfers())
        assert references == {b: pool.num_references(b) for b in range(pool.num_blocks) if pool.num_references(b)}
        queues = {
            Status.RUNNING: scheduler.running,
            Status.WAITING: scheduler.waiting,
            Status.SWAPPED: scheduler.swapped,
        }
        for status, queue in queues.items():
            ranks = list(map(scheduler.ranking.rank, queue))
            assert ranks == sorted(set(ranks))
            assert all(sequence.status is status for sequence in queue)
        self._check_swapped()
        seated = (*scheduler.running, *self.remote)
        assert sum(map(scheduler.admission.num_seats, seated)) <= scheduler.config.max_num_seqs
        for sequence in scheduler.running:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            assert sequence.num_computed_tokens <= len(sequence.block_table) * pool.block_size
            assert sequence.num_computed_tokens < sequence.num_tokens
        for sequence in self.sequences:
            assert sequence.num_preemptions <= len(self.sequences), "preempted again and again"
            holds = sequence in self.remote or sequence in self.ended_remote or sequence.status is Status.RUNNING
            assert holds or not sequence.block_table
        check_agrees(self.scheduler, self.naive, self.live(), self.expected)

    def _check_swapped(self) -> None:
        """Each host block is free, or holds computed tokens of one swapped sequence."""
        swap_space = self.scheduler.swap_space
        swap_space.check_integrity()
        held = [b for sequence in self.sequences for b in sequence.host_block_ids]
        assert len(set(held)) == len(held) == swap_space.num_blocks - swap_space.num_free
        for sequence in self.sequences:
            if sequence.status is Status.SWAPPED:
                assert sequence.num_computed_tokens == self._num_computed[sequence], "it has forgotten what it had"
                self._check_slots(sequence, self._host_slots, sequence.host_block_ids, sequence.num_computed_tokens)
            else:
                assert not sequence.host_block_ids

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler, pool, rank = self.scheduler, self.pool, self.scheduler.ranking.rank
        assert sum(row.num_new_tokens for row in plan.scheduled) <= scheduler.config.max_num_batched_tokens
        assert all(row.num_new_tokens > 0 for row in plan.scheduled)
        rows = [row.sequence for row in plan.scheduled]
        assert len(set(rows)) == len(rows)
        starts = [start.sequence for start in (*plan.admitted, *plan.grants)]
        served = {growth.sequence for growth in plan.growth} | set(starts)
        live = {name_of(sequence): sequence for sequence in self.live()}
        in_turn = [live[twin.name] for twin in self.naive.queue()]
        for victim in plan.preempted:
            assert victim in scheduler.running
            assert victim not in served, "it gives way and gets blocks"
            assert victim not in rows, "it gives way and computes"
            assert any(rank(sequence) < rank(victim) for sequence in served), "nobody above it got anything"
            if starts:  # then it was for the last of them
                last = max(starts, key=in_turn.index)
                assert last.request.priority < victim.request.priority
                assert rank(last) < rank(victim)
            lost = Counter(b for other in plan.preempted for b in other.block_table)
            assert any(pool.num_references(b) == lost[b] for b in victim.block_table), "it gives way for nothing"
        self._check_swap_outs(plan)
        num_tokens = sum(row.num_new_tokens for row in plan.scheduled)
        # Those who give way give their tokens back, when whoever lacked them has been passed already.
        lacks_tokens = num_tokens == scheduler.config.max_num_batched_tokens or bool(plan.preempted)
        for index, sequence in enumerate(in_turn):
            behind = [other for other in starts if other in in_turn[index + 1 :] and sequence not in starts]
            assert all(other.awaits_kv for other in behind), "one that computes passed another"
            assert not behind or (lacks_tokens and not sequence.awaits_kv), "one passed another"
        if scheduler.running and scheduler.running[0] not in (*rows, *plan.preempted):
            self._check_stuck(scheduler.running[0])

    def _check_swap_outs(self, plan: StepPlan) -> None:
        """Those that give way are swapped while there is room for all that they have computed."""
        num_left = self.scheduler.swap_space.num_free
        num_left -= sum(blocks_for(s.num_computed_tokens, self.pool.block_size) for s in plan.swapped_out)
        assert num_left >= 0
        assert set(plan.swapped_out) <= set(plan.preempted)
        for victim in set(plan.preempted) - set(plan.swapped_out):
            assert blocks_for(victim.num_computed_tokens, self.pool.block_size) > num_left, "it would have fitted"

    def _check_stuck(self, oldest: Sequence) -> None:
        """The oldest may skip a step only where all that it does not hold itself belongs to transfers."""
        transfers = set(self.held_by_transfers())
        assert transfers, "the oldest does not advance"
        assert self.pool.num_free == 0, "the oldest does not advance, and there is room"
        for other in self.scheduler.running[1:]:
            assert all(self.pool.num_references(b) > 1 for b in other.block_table), "somebody could have given way"

    def _check_applied(self, plan: StepPlan) -> None:
        scheduler, pool, rank = self.scheduler, self.pool, self.scheduler.ranking.rank
        for row in plan.scheduled:
            assert row.start == row.sequence.num_computed_tokens
            assert row.end <= row.sequence.num_tokens
            assert row.end <= len(row.sequence.block_table) * pool.block_size
        starts = [start.sequence for start in (*plan.admitted, *plan.grants)]
        if starts:
            youngest = max(map(rank, starts))
            if any(rank(sequence) < youngest for sequence in (*scheduler.running, *self.remote)):
                assert pool.num_free >= scheduler.admission.watermark_blocks(pool.num_blocks)
        for sequence in starts:
            assert len(sequence.block_table) == scheduler.admission.terms(sequence).num_blocks

    # --- for worlds that differ

    def _started(self, plan: StepPlan) -> None:
        """What a node does with the sequences that a plan has started."""

    def _take(self, sequence: Sequence, tokens: list[OutputToken]) -> None:
        """What an engine does with what was sampled."""
        going_on = [token for token in tokens if token.finish_reason is None]
        if going_on:
            self.naive.take(name_of(sequence), {token.choice: token.token_id for token in going_on})
        else:
            self.naive.end(name_of(sequence))
        if sequence.num_choices == 1 or not going_on:
            sequence.token_ids.append(tokens[0].token_id)
            if not going_on:
                self.scheduler.finish(sequence)
        else:
            sequences, copies = self.scheduler.fork(sequence, going_on)
            assert sequences[0] is sequence
            self.sequences += sequences[1:]
            self._copy_slots(self._slots, self._slots, copies)

    def _swap(self, applied: Applied) -> None:
        """What an engine does with KV that goes to host memory and comes back."""
        for swap in applied.swap_outs:
            self._num_computed[swap.sequence] = swap.sequence.num_computed_tokens
            self._copy_slots(self._slots, self._host_slots, swap.copies)
        for swap in applied.swap_ins:
            self._copy_slots(self._host_slots, self._slots, swap.copies)
            self.scheduler.restored(swap.sequence)
            assert swap.sequence.num_computed_tokens == self._num_computed.pop(swap.sequence)
            self.check_kv(swap.sequence, swap.sequence.block_table, swap.sequence.num_computed_tokens)

    def _copy_slots(self, source: dict[Any, int], target: dict[Any, int], copies: Iterable[tuple[int, int]]) -> None:
        for source_id, target_id in copies:
            for slot in range(self.pool.block_size):
                target[(target_id, slot)] = source.get((source_id, slot), _GARBAGE)

    # --- the model that is none

    @property
    def _decode(self) -> DecodeScheduler:
        assert isinstance(self.scheduler, DecodeScheduler)
        return self.scheduler

    def _chain(self, sequence: Sequence) -> list[int]:
        """What each of its slots should hold."""
        chain = self._chains.setdefault(sequence, [])
        for position in range(len(chain), sequence.num_tokens):
            before = chain[-1] if chain else crc32(sequence.request.cache_salt.encode())
            chain.append(hash((before, sequence.token_ids[position])))
        return chain

    def _sample(self, sequence: Sequence) -> list[OutputToken]:
        """The next token of each choice; equal contexts often have equal ones, so that outputs share blocks too. Some
        of several choices end with their first."""
        tokens = []
        for choice in sequence.choices:
            value = self._chain(sequence)[-1] + (choice if sequence.num_choices > 1 else 0)
            is_last = sequence.num_output_tokens + 1 == sequence.request.sampling.max_tokens
            ends = is_last or (sequence.num_choices > 1 and value % 5 == 0)
            reason = FinishReason.STOP if ends else None
            tokens.append(OutputToken(choice=choice, token_id=value % 3, finish_reason=reason))
        return tokens

    def _slot(self, block_table: Seq[int], position: int) -> tuple[int, int]:
        return block_table[position // self.pool.block_size], position % self.pool.block_size

    def check_kv(self, sequence: Sequence, block_table: Seq[int], end: int) -> None:
        """The slots of tokens [0, end) hold what they should."""
        self._check_slots(sequence, self._slots, block_table, end)

    def _check_slots(self, sequence: Sequence, slots: dict[Any, int], block_table: Seq[int], end: int) -> None:
        for position, expected in enumerate(self._chain(sequence)[:end]):
            assert slots.get(self._slot(block_table, position)) == expected, f"{sequence.key}: KV of {position}"

    def _compute(self, scheduled: Iterable[Scheduled]) -> None:
        rows = list(scheduled)
        for row in rows:
            self.check_kv(row.sequence, row.sequence.block_table, row.start)
        for row in rows:
            chain = self._chain(row.sequence)
            for position in range(row.start, row.end):
                self._slots[self._slot(row.sequence.block_table, position)] = chain[position]

    def _write_granted(self, sequence: Sequence, granted: GrantPlan) -> None:
        chain = self._chain(sequence)
        for piece in granted.ranges:
            assert len(piece.block_ids) == blocks_for(piece.end - piece.start, self.pool.block_size)
            for position in range(piece.start, piece.end):
                self._slots[self._slot(piece.block_ids, position - piece.start)] = chain[position]

    def _scribble(self, granted: GrantPlan) -> None:
        for piece in granted.ranges:
            for block_id in piece.block_ids:
                self._slots.update({(block_id, slot): _GARBAGE for slot in range(self.pool.block_size)})


class PrefillWorld(World):
    """A prefill node: it pins what it offers, and is done with a prompt at its first token."""

    role = "prefill"

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.pins: dict[Sequence, tuple[int, ...]] = {}

    def unpin(self, sequence: Sequence) -> None:
        """The transfer has read the blocks for the last time: they still hold what was computed."""
        pinned = self.pins.pop(sequence)
        if sequence.num_computed_tokens == sequence.request.num_tokens:
            self.check_kv(sequence, pinned, sequence.request.num_tokens)
        self.pool.release(pinned)
        self.naive.unpin(name_of(sequence))

    def end_transfers(self) -> None:
        for sequence in [s for s in self.pins if s.status is Status.FINISHED]:
            self.unpin(sequence)

    def held_by_transfers(self) -> list[int]:
        return [b for pinned in self.pins.values() for b in pinned]

    def _started(self, plan: StepPlan) -> None:
        assert not plan.preempted
        assert not plan.growth
        for start in plan.admitted:
            pinned = tuple(start.sequence.block_table)
            assert len(pinned) * self.pool.block_size >= start.sequence.num_tokens
            self.pool.acquire(pinned)
            self.pins[start.sequence] = pinned
            self.naive.pin(name_of(start.sequence))

    def _take(self, sequence: Sequence, tokens: list[OutputToken]) -> None:
        self.naive.end(name_of(sequence))
        self.scheduler.finish(sequence)


class DecodeWorld(World):
    """A decode node."""

    role = "decode"


def local_world(num_blocks: int, *, num_host_blocks: int = 0, **options: Any) -> World:
    config = make_config(**options)
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_caching)
    admission = LocalAdmission(BLOCK_SIZE, config.watermark)
    return World(Scheduler(config, pool, admission, num_host_blocks=num_host_blocks))


def decode_world(num_blocks: int, *, num_host_blocks: int = 0, **options: Any) -> World:
    config = make_config(**options)
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_caching)
    return DecodeWorld(DecodeScheduler(config, pool, num_host_blocks=num_host_blocks))


def prefill_world(num_blocks: int, **options: Any) -> PrefillWorld:
    config = make_config(**options)
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_caching)
    return PrefillWorld(Scheduler(config, pool, PrefillAdmission(BLOCK_SIZE, config.watermark)))


def fingerprint(world: World) -> tuple[Any, ...]:
    """Everything that a plan could have changed, in a form that compares."""
    scheduler = world.scheduler
    sequences = tuple(
        (
            tuple(s.token_ids),
            s.num_computed_tokens,
            s.num_cached_tokens,
            tuple(s.block_table),
            tuple(s.block_hashes),
            s.status,
            s.awaits_kv,
            s.num_preemptions,
            s.host_block_ids,
        )
        for s in world.sequences
    )
    queues = (
        tuple(scheduler.running),
        tuple(scheduler.waiting),
        tuple(scheduler.swapped),
        frozenset(scheduler.seated()),
    )
    return (repr(vars(world.pool)), repr(vars(scheduler.swap_space)), queues, scheduler.statistics(), sequences)


def _final_length(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
