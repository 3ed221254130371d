"""An executor without a model, whose KV are bytes all the same: what it computes on must be there, or the test fails.

A slot holds a number that depends on every token up to its position and on the salt, as real KV does. Each row's whole
context is compared before the row is computed, so a block that was overwritten, lost, shared or copied wrongly is
noticed by whoever reads it.
"""

from collections.abc import Sequence as Seq
from typing import Any
from zlib import crc32

import numpy as np

from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.step import Row, RowResult, Sampled, Scheduled

_GARBAGE = -1


class SlotExecutor:
    """Slots of a pool, and of host memory. Samples what follows from the last slot."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.slots = np.full((num_blocks, block_size), _GARBAGE, dtype=np.int64)
        self.host_slots = np.full((num_host_blocks, block_size), _GARBAGE, dtype=np.int64)
        self.fails_to_swap_out = False
        self.fails_to_swap_in = False
        self.num_computed = 0

    @property
    def region(self) -> Any:
        return self.slots.view(np.uint8)

    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        for item in scheduled:
            expected = slots_of(item.sequence)
            found = [self.slots[self._place(item.sequence, position)] for position in range(item.start)]
            assert found == expected[: item.start], f"{item.sequence.key}: its KV is not what it computed"
        for item in scheduled:
            self.num_computed += item.num_new_tokens
            for position in range(item.start, item.end):
                self.slots[self._place(item.sequence, position)] = slots_of(item.sequence)[position]
        return [self._sample(item) for item in scheduled]

    def copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        for source, target in copies:
            self.slots[target] = self.slots[source]

    def swap_out(self, copies: Seq[tuple[int, int]]) -> None:
        """If it is to fail, it has written some blocks by then."""
        for block_id, host_block_id in copies:
            self.host_slots[host_block_id] = self.slots[block_id]
            if self.fails_to_swap_out:
                raise RuntimeError("as asked")

    def swap_in(self, copies: Seq[tuple[int, int]]) -> None:
        for host_block_id, block_id in copies:
            if self.fails_to_swap_in:
                self.slots[block_id] = _GARBAGE
                raise RuntimeError("as asked")
            self.slots[block_id] = self.host_slots[host_block_id]

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        self.slots[block_id, first_slot:] = 0

    def _place(self, sequence: Sequence, position: int) -> tuple[int, int]:
        block_size = self.layout.block_size
        return sequence.block_table[position // block_size], position % block_size

    def _sample(self, item: Scheduled) -> Row | KvrelayError:
        if not item.samples:
            return Row()
        sequence = item.sequence
        last = slots_of(sequence)[-1]
        return Row(tuple(Sampled(_next_token(last, choice, sequence.num_choices)) for choice in sequence.choices))


def slots_of(sequence: Sequence) -> list[int]:
    """What each slot of a sequence holds once it is computed."""
    return _slots(sequence.token_ids, sequence.request.cache_salt)


def expected_tokens(request: Request, choice: int) -> list[int]:
    """What a choice becomes, whatever happens to it on the way."""
    token_ids = list(request.prompt_token_ids)
    for i in range(request.sampling.max_tokens):
        num_choices = request.sampling.n if i == 0 else 1
        token_ids.append(_next_token(_slots(token_ids, request.cache_salt)[-1], choice, num_choices))
    return token_ids[request.num_tokens :]


def _next_token(last_slot: int, choice: int, num_choices: int) -> int:
    """Few ids, so that outputs share blocks too; choices part with their first tokens."""
    return (last_slot + (choice if num_choices > 1 else 0)) % 3


def _slots(token_ids: Seq[int], cache_salt: str) -> list[int]:
    slots, before = [], crc32(cache_salt.encode())
    for token_id in token_ids:
        before = hash((before, token_id))
        slots.append(before)
    return slots
