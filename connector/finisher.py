"""What is still to be done to blocks that a transfer has filled: check their digests, widen them to D's own elements.

On a thread beside the one that keeps the sessions: both take about as long as a copy of the blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kvrelay.connector.checksum import block_digest
from kvrelay.connector.convert import widen
from kvrelay.connector.incoming import Incoming
from kvrelay.connector.loop import Loop
from kvrelay.connector.plan import plan_block_ids, plan_positions
from kvrelay.connector.transport.base import Region
from kvrelay.engine.clock import Clock
from kvrelay.engine.kv_layout import blocks_for

Finished = Callable[[bool], None]
"""Called with whether the blocks hold what P's digests say."""


class Finisher:
    """Finishes granted blocks, and says so on the connector's thread."""

    def __init__(self, region: Region, block_size: int, clock: Clock, connector: Loop) -> None:
        self._region = region
        self._block_size = block_size
        self._connector = connector
        self._loop = Loop("kv-finisher", clock)

    def start(self) -> None:
        self._loop.start()

    def stop(self, timeout_s: float) -> bool:
        """Whether the thread ended in time."""
        return self._loop.stop(timeout_s)

    def finish(self, transfer: Incoming, finished: Finished) -> None:
        """`finished` is called at once, if there is nothing to be done. With the receiver's lock held."""
        assert transfer.handover is not None
        transit, block_ids = transfer.peer.session.transit, plan_block_ids(transfer.plan)
        has_digests = bool(transfer.handover.block_digests)
        if not has_digests and not (transit.is_widened and block_ids):
            finished(True)
            return
        wanted = self._wanted_digests(transfer)
        if has_digests and wanted is None:
            finished(False)
            return
        transfer.is_in_hand = transit.is_widened  # blocks that are only read may go back meanwhile

        def work() -> None:
            ok = self._work(transfer, block_ids, wanted)
            self._connector.post(partial(finished, ok))

        self._loop.post(work)

    def _work(self, transfer: Incoming, block_ids: Sequence[int], wanted: list[bytes] | None) -> bool:
        """On the thread. Whether the blocks are as they were sent; then they are D's own afterwards."""
        transit = transfer.peer.session.transit
        blocks = [self._region[block_id] for block_id in block_ids]
        if wanted is not None:
            come = [block[: transit.block_bytes] for block in blocks]
            if not all(block_digest(c) == digest for c, digest in zip(come, wanted, strict=True)):
                return False
        if transit.is_widened:
            for block in blocks:
                widen(transit, block)
        return True

    def _wanted_digests(self, transfer: Incoming) -> list[bytes] | None:
        """The digests of the granted blocks, in order; None: P sent none, or too few or too many."""
        assert transfer.handover is not None
        assert transfer.expectation is not None
        digests = transfer.handover.block_digests
        if not transfer.peer.session.transit.is_direct:  # of what travelled
            return list(digests) if digests and len(digests) == transfer.num_blocks else None
        if len(digests) != blocks_for(transfer.expectation.num_tokens, self._block_size):
            return None
        return [digests[position] for position in plan_positions(transfer.plan, self._block_size)]
