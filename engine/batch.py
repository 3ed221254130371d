"""From what the scheduler chose to what the model computes on: one flat batch of tokens. Pure.

    rows       0 1 2 3 4 5 6 | 7 | 8 | 9 ... 15
    sequence   a a a a a a a | b | c | padding (token 0, position 0, slot -1)

Shapes: T tokens of the batch (rows), S sequences, M block table entries, R rows that sample, P rows for prompt tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.engine.step import Scheduled
from kvrelay.kernels.base import AttentionBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, with where their keys and values go and what they attend to."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]: block * block size + offset, -1 for padding
    attention: AttentionBatch
    sample_rows: Tensor  # [R]: the last row of each sequence that samples, in the order scheduled
    prompt_rows: Tensor  # [P]: the row before each token of `prompt_positions` but 0, which nothing comes before


def prompt_positions(item: Scheduled) -> range:
    """The prompt tokens whose log-probabilities are wanted and come from this step's rows: the first has none, any
    other comes from the row before it."""
    sequence = item.sequence
    positions = range(sequence.num_prompt_logprobs, min(item.end + 1, sequence.num_prompt_tokens))
    assert not positions or item.start <= max(positions.start - 1, 0), f"{sequence.key}: a row was passed over"
    return positions


def build_batch(scheduled: Seq[Scheduled], block_size: int, row_multiple: int, device: torch.device) -> ForwardBatch:
    """Lay the scheduled tokens out one sequence after the other, padded to a multiple of `row_multiple` rows."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    for item in scheduled:
        block_table = item.sequence.block_table
        first_row = len(token_ids)
        prompt_rows += [first_row + i - 1 - item.start for i in prompt_positions(item) if i > 0]
        token_ids += item.sequence.token_ids[item.start : item.end]
        positions += range(item.start, item.end)
        slots += [block_table[i // block_size] * block_size + i % block_size for i in range(item.start, item.end)]
        query_starts.append(len(token_ids))
        if item.samples:
            sample_rows.append(len(token_ids) - 1)
    num_padding = -len(token_ids) % row_multiple

    width = max(-(-item.end // block_size) for item in scheduled)
    block_tables = torch.zeros(len(scheduled), width, dtype=torch.int64)
    for s, item in enumerate(scheduled):
        used = item.sequence.block_table[: -(-item.end // block_size)]
        block_tables[s, : len(used)] = torch.tensor(used)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ForwardBatch(
        token_ids=tensor(token_ids + [0] * num_padding),
        positions=tensor(positions + [0] * num_padding),
        slot_mapping=tensor(slots + [-1] * num_padding),
        attention=AttentionBatch(
            query_starts=tensor(query_starts),
            seq_lens=tensor([item.end for item in scheduled]),
            block_tables=block_tables.to(device),
        ),
        sample_rows=tensor(sample_rows),
        prompt_rows=tensor(prompt_rows),
    )
