"""A scheduler and its naive twin: how the one is put in the other's words, and that both hold the same."""

from collections.abc import Sequence as Seq
from math import ceil

from support.naive_scheduler import Decision, Event, NaiveScheduler, NaiveSequence, Name, Role, Rules

from kvrelay.engine.block_hash import block_hashes
from kvrelay.engine.block_pool import BlockEvent, BlockEvicted, BlockStored
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Sequence
from kvrelay.engine.scheduler import Scheduler


def name_of(sequence: Sequence) -> Name:
    return int(sequence.request.arrival), sequence.choice


def naive_sequence(sequence: Sequence, *, remote: bool) -> NaiveSequence:
    request = sequence.request
    return NaiveSequence(
        name=name_of(sequence),
        arrival=request.arrival,
        priority=request.priority,
        salt=request.cache_salt,
        n=request.sampling.n,
        tokens=list(request.prompt_token_ids),
        state="expected" if remote else "waiting",
        awaits_kv=remote,
        num_first=request.num_tokens,
    )


def in_names(plan: StepPlan) -> Decision:
    """A plan as a naive scheduler puts it."""
    return Decision(
        preempted=list(map(name_of, plan.preempted)),
        swapped_out=set(map(name_of, plan.swapped_out)),
        growth={name_of(growth.sequence): growth.num_new_blocks for growth in plan.growth},
        admitted={name_of(s.sequence): (len(s.cached_block_ids), s.num_new_blocks) for s in plan.admitted},
        grants={name_of(s.sequence): (len(s.cached_block_ids), s.num_new_blocks) for s in plan.grants},
        rows={name_of(row.sequence): (row.start, row.end) for row in plan.scheduled},
    )


def rules_of(scheduler: Scheduler, role: Role) -> Rules:
    config, pool = scheduler.config, scheduler.pool
    return Rules(
        role=role,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        seats=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        threshold=config.long_prefill_token_threshold,
        ageing_s=config.priority_ageing_s,
        host_blocks=scheduler.swap_space.num_blocks,
        num_spare=ceil(pool.num_blocks * config.watermark),
        prefix_caching=config.prefix_caching,
    )


def check_agrees(scheduler: Scheduler, naive: NaiveScheduler, live: Seq[Sequence], expected: Seq[Sequence]) -> None:
    """Both have the same sequences in the same state, the same blocks by number, and told of the same events."""
    named = {name_of(sequence): sequence for sequence in live}
    assert named.keys() == naive.sequences.keys()
    for name, sequence in named.items():
        twin = naive.sequences[name]
        assert twin.state == ("expected" if sequence in expected else sequence.status.name.lower())
        assert twin.tokens == sequence.token_ids
        assert twin.computed == sequence.num_computed_tokens
        assert twin.cached == sequence.num_cached_tokens
        assert len(twin.table) == len(sequence.block_table)
        assert twin.preemptions == sequence.num_preemptions
    counts = scheduler.pool.counts()
    assert (counts.owned, counts.cached) == (len(naive.held()), len(naive.cached()))
    assert scheduler.pool.drain_events() == ([_event(event, scheduler.pool.block_size) for event in naive.events], 0)
    naive.events.clear()


def _event(event: Event, block_size: int) -> BlockEvent:
    kind, (salt, tokens) = event
    block_hash = block_hashes(tokens, block_size, salt)[-1]
    return BlockStored(block_hash) if kind == "stored" else BlockEvicted(block_hash)
