"""The remote-KV gate over the engine's scheduler: what waits for another node's KV holds up nobody.

    expect ---> EXPECTED --- offered --> queue <------ add: local prompts
                                          |  ^
                          granted by plan |  | preempted, then swapped in or recomputed here: never REMOTE again
                                          v  |
                 give_back <--- REMOTE -- landed --> running
                     ^            | abort, then quarantine
                     +------- QUARANTINED

A grant comes when its turn in the queue has come and there is a seat and room; it takes nothing of a step. What is
REMOTE belongs to the transfer: it is no victim of preemption, an abort leaves its blocks, and only `landed` and
`give_back` move them. In quarantine are the granted blocks of a transfer that has ended and whose writer may still be
at work; what quarantine leaves may be too little for anything to go on: then `starved` says who is to hear of it.
"""

from dataclasses import replace

from kvrelay.decode_node.admission import DecodeAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Sequence, Status
from kvrelay.engine.scheduler import Scheduler, SchedulerStatistics


class DecodeScheduler(Scheduler):
    """The engine's scheduler, with sequences whose prompt another node computes. Owned by the engine thread."""

    def __init__(self, config: EngineConfig, pool: BlockPool, *, num_host_blocks: int = 0) -> None:
        admission = DecodeAdmission(pool.block_size, config.watermark)
        super().__init__(config, pool, admission, num_host_blocks=num_host_blocks)
        self.expected: set[Sequence] = set()  # called for; their KV is not on offer yet
        self._remote: set[Sequence] = set()
        self._ended: set[Sequence] = set()  # aborted while REMOTE: their transfers still own their blocks
        self._quarantined: set[Sequence] = set()  # of the ended: their blocks that were granted, and no others

    def expect(self, sequence: Sequence) -> None:
        """The router has called for a sequence whose KV will be offered.

        Raises: TooLarge.
        """
        self.check_fits(sequence.request)
        sequence.awaits_kv = True
        self.expected.add(sequence)

    def offered(self, sequence: Sequence) -> None:
        """Its KV is on offer: it joins the queue at its rank."""
        self.expected.remove(sequence)
        self._enqueue(sequence)

    def landed(self, sequence: Sequence) -> None:
        """Its prompt's KV is in its blocks, which are its own from now on: it runs, and lacks its first tokens."""
        self._remote.remove(sequence)
        self._publish(sequence, sequence.num_cached_tokens, sequence.num_tokens)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.awaits_kv = False
        self._run(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """End a sequence whose transfer ended without landing, or after an abort: no write can reach its blocks."""
        if sequence.status is Status.REMOTE:
            self.abort(sequence)
        self._ended.remove(sequence)
        if sequence in self._quarantined:
            self._quarantined.remove(sequence)
            self.pool.end_quarantine(sequence.block_table)
            sequence.block_table = []
        else:
            self._release(sequence)

    def quarantine(self, sequence: Sequence) -> None:
        """A write may still reach what was granted to a sequence that has ended: nobody gets those blocks until
        `give_back`. The others, found in the cache or kept for its next token, are out of any writer's reach."""
        assert sequence in self._ended, f"{sequence.key} goes to quarantine, but has not ended"
        first = sequence.num_cached_tokens // self.pool.block_size
        end = max(first, blocks_for(sequence.num_tokens, self.pool.block_size))
        granted, others = sequence.block_table[first:end], [*sequence.block_table[:first], *sequence.block_table[end:]]
        self.pool.release(others)
        self.pool.quarantine(granted)
        sequence.block_table = granted
        self._quarantined.add(sequence)

    def starved(self) -> Sequence | None:
        """After an empty plan: the oldest, if blocks in quarantine are what keeps everything from going on."""
        if not self.pool.counts().quarantined or self._remote:
            return None
        return min((*self.running, *self._in_turn()), key=self.ranking.rank, default=None)

    def abort(self, sequence: Sequence) -> None:
        """As for any sequence, but one that is REMOTE leaves its blocks to the transfer until `give_back`."""
        if sequence in self.expected:
            self.expected.remove(sequence)
            sequence.status = Status.FINISHED
        elif sequence.status is Status.REMOTE:
            self._remote.remove(sequence)
            self._ended.add(sequence)
            sequence.status = Status.FINISHED
        else:
            super().abort(sequence)

    def seated(self) -> list[Sequence]:
        return [*self.running, *self._remote]

    def statistics(self) -> SchedulerStatistics:
        return replace(super().statistics(), num_remote=len(self._remote), num_expected=len(self.expected))

    def _grant(self, sequence: Sequence) -> None:
        sequence.status = Status.REMOTE
        self._remote.add(sequence)
