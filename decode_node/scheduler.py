"""The remote-KV gate over the engine's scheduler: what waits for another node's KV holds up nobody.

    expect ---> EXPECTED --- offered --> queue <------ add: local prompts
                                          |  ^
                          granted by plan |  | preempted, then swapped in or recomputed here: never REMOTE again
                                          v  |
                 give_back <--- REMOTE -- landed --> running

A grant comes when its turn in the queue has come and there is a seat and room; it takes nothing of a step. What is
REMOTE belongs to the transfer: it is no victim of preemption, an abort leaves its blocks, and only `landed` and
`give_back` move them.
"""

from dataclasses import replace

from kvrelay.decode_node.admission import DecodeAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.config import EngineConfig
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
        self._release(sequence)

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
