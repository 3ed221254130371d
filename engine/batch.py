"""From what the scheduler chose to what the model computes on: one flat batch of tokens. Pure.

    rows       0 1 2 3 4 5 6 | 7 | 8 | 9 ... 15
    sequence   a a a a a a a | b | c | padding (token 0, position 0, slot -1)

Shapes: T tokens of the batch (rows), S sequences, M block table entries, R rows that sample, P rows for prompt tokens.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvrelay.engine.step import Scheduled
from kvrelay.kernels.base import AttentionBatch

_NO_POSITIONS = range(0)


@dataclass(frozen=True)  # with a dict, where the views are kept
class ForwardBatch:
    """The tokens of one step, with where their keys and values go and what they attend to.

    All numbers lie in one array, part after part in the order of `sizes`. Its parts as tensors are made when they are
    asked for: compiled kernels take their addresses alone.
    """

    numbers: "array[int]"  # int64
    num_rows: int  # T
    num_sequences: int  # S
    num_sampled: int  # R
    num_prompt_rows: int  # P
    table_width: int  # M
    device: torch.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each part has: token ids, positions, slots, query starts, sequence lengths, rows that
        sample, rows for prompt tokens, block tables."""
        rows, sequences = self.num_rows, self.num_sequences
        tables = sequences * self.table_width
        return (rows, rows, rows, sequences + 1, sequences, self.num_sampled, self.num_prompt_rows, tables)

    def addresses(self) -> tuple[int, ...]:
        """Where each part begins, on the CPU."""
        start = self.numbers.buffer_info()[0]
        return tuple(start + 8 * num_before for num_before in accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def _parts(self) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(torch.frombuffer(self.numbers, dtype=torch.int64).to(self.device), self.sizes)

    @property
    def token_ids(self) -> Tensor:
        """[T]"""
        return self._parts[0]

    @property
    def positions(self) -> Tensor:
        """[T]"""
        return self._parts[1]

    @property
    def slot_mapping(self) -> Tensor:
        """[T]: block * block size + offset, -1 for padding."""
        return self._parts[2]

    @cached_property
    def attention(self) -> AttentionBatch:
        tables = self._parts[7].view(self.num_sequences, self.table_width)
        return AttentionBatch(query_starts=self._parts[3], seq_lens=self._parts[4], block_tables=tables)

    @property
    def sample_rows(self) -> Tensor:
        """[R]: the last row of each sequence that samples, in the order scheduled."""
        return self._parts[5]

    @property
    def prompt_rows(self) -> Tensor:
        """[P]: the row before each token of `prompt_positions` but 0, which nothing comes before."""
        return self._parts[6]


def prompt_positions(item: Scheduled) -> range:
    """The prompt tokens whose log-probabilities are wanted and come from this step's rows: the first has none, any
    other comes from the row before it."""
    sequence = item.sequence
    first, num_prompt_tokens = sequence.num_prompt_logprobs, sequence.num_prompt_tokens
    if first == num_prompt_tokens:
        return _NO_POSITIONS
    positions = range(first, min(item.end + 1, num_prompt_tokens))
    assert not positions or item.start <= max(first - 1, 0), f"{sequence.key}: a row was passed over"
    return positions


def build_batch(scheduled: Seq[Scheduled], block_size: int, row_multiple: int, device: torch.device) -> ForwardBatch:
    """Lay the scheduled tokens out one sequence after the other, padded to a multiple of `row_multiple` rows."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    seq_lens: list[int] = []
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    block_tables: list[int] = []
    width = max(-(-item.end // block_size) for item in scheduled)
    for item in scheduled:
        sequence, start, end = item.sequence, item.start, item.end
        block_table, first_row = sequence.block_table, len(token_ids)
        prompt_rows += [first_row + i - 1 - start for i in prompt_positions(item) if i > 0]
        token_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        slots += [block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]
        query_starts.append(first_row + end - start)
        seq_lens.append(end)
        if item.samples:
            sample_rows.append(first_row + end - start - 1)
        num_used = -(-end // block_size)
        block_tables += block_table[:num_used]
        block_tables += [0] * (width - num_used)
    padding = [0] * (-len(token_ids) % row_multiple)
    token_ids += padding
    positions += padding
    slots += [-1] * len(padding)
    numbers = [*token_ids, *positions, *slots, *query_starts, *seq_lens, *sample_rows, *prompt_rows, *block_tables]
    return ForwardBatch(
        numbers=array("q", numbers),
        num_rows=len(token_ids),
        num_sequences=len(scheduled),
        num_sampled=len(sample_rows),
        num_prompt_rows=len(prompt_rows),
        table_width=width,
        device=device,
    )
