"""Who may start, and with how many blocks: the scheduler's policy object. Pure.

The roles differ here and not in the scheduler: what a prefill node holds is in `prefill_node/admission.py`, what a
grant holds in `decode_node/admission.py`. Below is the rule of a node that does everything by itself.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sequence gets at its start."""

    num_blocks: int  # held from the start on, cached ones included: room for every token it has by then, or more
    max_cached_blocks: int  # of its first blocks, so many may come from the prefix cache
    computes: bool = True  # False: another node fills the blocks; it takes a seat, but no token of a step


class Admission(Protocol):
    """The rules of one role."""

    def terms(self, sequence: Sequence) -> Terms:
        """What a waiting sequence gets when its turn comes."""

    def most_blocks(self, request: Request) -> int:
        """The most blocks that one sequence of a request ever holds."""

    def watermark_blocks(self, num_blocks: int) -> int:
        """Blocks, of so many, that a start leaves free for those that rank above it to grow into."""


@dataclass(frozen=True, slots=True)
class LocalAdmission:
    """A node that computes prompts and decodes them: room for what is there and one token more."""

    block_size: int
    watermark: float  # a share of all blocks

    def terms(self, sequence: Sequence) -> Terms:
        return Terms(
            num_blocks=blocks_for(sequence.num_tokens + 1, self.block_size),
            max_cached_blocks=(sequence.num_tokens - 1) // self.block_size,  # one token is left to compute
        )

    def most_blocks(self, request: Request) -> int:
        return blocks_for(len(request.prompt_token_ids) + request.sampling.max_tokens, self.block_size)

    def watermark_blocks(self, num_blocks: int) -> int:
        return math.ceil(num_blocks * self.watermark)
