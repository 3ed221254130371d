"""What a prefill node reserves: the whole prompt at once, and nothing beyond it. Pure.

So a prompt that has started never needs another block: nothing is preempted here, and an offer names every block.
"""

from dataclasses import dataclass

from kvrelay.engine.admission import LocalAdmission, Terms, most_cached_tokens
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class PrefillAdmission(LocalAdmission):
    """The prompt's blocks, not one for the tokens that are sampled from it: those are computed elsewhere."""

    def terms(self, sequence: Sequence) -> Terms:
        return Terms(
            num_blocks=blocks_for(sequence.num_tokens, self.block_size),
            max_cached_blocks=most_cached_tokens(sequence) // self.block_size,
        )

    def num_seats(self, sequence: Sequence) -> int:
        return 1

    def most_blocks(self, request: Request) -> int:
        return blocks_for(request.num_tokens, self.block_size)
