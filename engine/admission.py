"""Who may start, and with how many blocks: the scheduler's policy object. Pure.

The roles differ here and not in the scheduler: what a prefill node holds is in `prefill_node/admission.py`, what a
grant holds in `decode_node/admission.py`. Below is the rule of a node that does everything by itself.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Request, Sequence, Status


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

    def num_seats(self, sequence: Sequence) -> int:
        """How many of max_num_seqs a sequence takes, from its start on."""

    def most_blocks(self, request: Request) -> int:
        """The most blocks that one sequence of a request ever holds."""

    def watermark_blocks(self, num_blocks: int) -> int:
        """Blocks, of so many, that a start leaves free for those that rank above it to grow into."""


@dataclass(frozen=True, slots=True)
class LocalAdmission:
    """A node that computes prompts and decodes them: room for what is there and one token more of each choice.

    Full blocks are shared by all choices, and each of them needs one block beside: for the rest of the prompt, of which
    each gets its copy, and its next token.
    """

    block_size: int
    watermark: float  # a share of all blocks

    def terms(self, sequence: Sequence) -> Terms:
        return Terms(
            num_blocks=self.blocks_to_start(sequence.num_tokens, sequence.num_choices),
            max_cached_blocks=most_cached_tokens(sequence) // self.block_size,
        )

    def num_seats(self, sequence: Sequence) -> int:
        return sequence.num_choices

    def most_blocks(self, request: Request) -> int:
        sampling = request.sampling
        alone = blocks_for(len(request.prompt_token_ids) + sampling.max_tokens, self.block_size)
        return max(alone, self.blocks_to_start(request.num_tokens, sampling.n))

    def blocks_to_start(self, num_tokens: int, num_choices: int) -> int:
        """Blocks for so many tokens and the next one of each choice."""
        return num_tokens // self.block_size + num_choices

    def watermark_blocks(self, num_blocks: int) -> int:
        return math.ceil(num_blocks * self.watermark)


def most_cached_tokens(sequence: Sequence) -> int:
    """How many of a sequence's tokens may come from the prefix cache: one is left to compute, and so are those whose
    outputs still have log-probabilities of the prompt to give. Swapped out: those that are computed."""
    if sequence.status is Status.SWAPPED:
        return sequence.num_computed_tokens
    if sequence.num_prompt_logprobs < sequence.num_prompt_tokens:
        return max(0, sequence.num_prompt_logprobs - 1)
    return sequence.num_tokens - 1
