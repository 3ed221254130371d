"""What the scheduler, the engine and the executor say to each other about one step."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import Sequence


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


# A row's next token, the error that ends this row alone, or None where the row has not reached its last token.
RowResult = int | KvrelayError | None


class Executor(Protocol):
    """Runs the model over the KV pool it owns. Called from the engine thread only."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def region(self) -> Any:
        """The pool as bytes: a writable numpy array, uint8 [num_blocks, block_bytes], the same memory, not a copy."""

    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        """Compute the tokens, write their KV, sample where a row reaches its end. Results in the order given."""

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        """Zero a block's slots [first_slot, block_size), in every layer, keys and values."""
