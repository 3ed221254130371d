"""What the scheduler, the engine and the executor say to each other about one step."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import Logprobs, Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute tokens [start, end) of a sequence, whose block table already covers them."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_new_tokens(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that its logits give the next one."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Swap:
    """A sequence's KV goes to host memory, or comes back from there."""

    sequence: Sequence
    copies: tuple[tuple[int, int], ...]  # whole blocks: (from, to) each


@dataclass(frozen=True, slots=True)
class Applied:
    """What is left to do for a plan that was applied, in this order."""

    swap_outs: tuple[Swap, ...] = ()  # to be copied before anything is written to blocks that changed hands
    swap_ins: tuple[Swap, ...] = ()
    scheduled: tuple[Scheduled, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and its log-probabilities where the request asks for them."""

    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a step found for one sequence."""

    sampled: tuple[Sampled, ...] = ()  # one a choice that the sequence stands for; none short of its last token
    prompt_logprobs: tuple[Logprobs, ...] = ()  # of prompt tokens from `sequence.num_prompt_logprobs` on


# The error is that row's alone.
RowResult = Row | KvrelayError


class Executor(Protocol):
    """Runs the model over the KV pool it owns. Called from the engine thread only."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that `swap_out` can write to."""

    @property
    def region(self) -> Any:
        """The pool as bytes: a writable numpy array, uint8 [num_blocks, block_bytes], the same memory, not a copy."""

    @property
    def region_fd(self) -> int | None:
        """A memfd whose bytes from 0 on are the region, if other processes may map it."""

    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        """Compute the tokens, write their KV, sample where a row reaches its end. Results in the order given."""

    def copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks: (from, to) each."""

    def swap_out(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks to host memory: (block, host block) each. Done when it returns."""

    def swap_in(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole blocks back: (host block, block) each. Done when it returns."""

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        """Zero a block's slots [first_slot, block_size), in every layer, keys and values."""
