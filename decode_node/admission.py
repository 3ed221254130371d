"""What a decode node grants, and where the missing tokens go. Pure.

Blocks and tokens are paired by absolute position in the prompt, never by counting from an end: what the cache holds is
[0, num_cached_tokens), what travels is [num_cached_tokens, N), and the room for token N + 1 is in neither.
"""

from dataclasses import dataclass

from kvrelay.connector.base import GrantedRange, GrantPlan
from kvrelay.engine.admission import LocalAdmission, Terms
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class DecodeAdmission(LocalAdmission):
    """Local prompts as anywhere; for KV that another node sends, the same room, and nothing to compute."""

    def terms(self, sequence: Sequence) -> Terms:
        if not sequence.awaits_kv:
            return LocalAdmission.terms(self, sequence)
        return Terms(
            num_blocks=self.blocks_to_start(sequence.num_tokens, sequence.num_choices),
            max_cached_blocks=sequence.num_tokens // self.block_size,  # all of them: then nothing travels
            computes=False,
        )


def grant_plan(sequence: Sequence, block_size: int) -> GrantPlan:
    """What a granted sequence lacks of its N tokens, and the blocks for it. No ranges: it lacks nothing."""
    start, end = sequence.num_cached_tokens, sequence.num_tokens
    if start == end:
        return GrantPlan(ranges=())
    block_ids = sequence.block_table[start // block_size : blocks_for(end, block_size)]
    return GrantPlan(ranges=(GrantedRange(start, end, tuple(block_ids)),))
