"""How scheduled tokens are laid out for the model."""

import torch
from support.forward import CPU, make_sequence

from kvrelay.engine.batch import build_batch
from kvrelay.engine.step import Scheduled


def test_rows_positions_slots_and_tables_are_those_of_the_scheduled_tokens() -> None:
    whole = make_sequence([10, 11, 12, 13, 14], [4, 2])
    part = make_sequence(range(20, 30), [7, 1, 5, 0])
    single = make_sequence([30, 31, 32, 33], [3, 6])
    batch = build_batch([Scheduled(whole, 0, 5), Scheduled(part, 4, 6), Scheduled(single, 3, 4)], 4, 5, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 24, 25, 33, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 3, 0, 0]
    assert batch.slot_mapping.tolist() == [16, 17, 18, 19, 8, 4, 5, 15, -1, -1]
    assert batch.attention.query_starts.tolist() == [0, 5, 7, 8]
    assert batch.attention.seq_lens.tolist() == [5, 6, 4]
    assert batch.attention.block_tables.tolist() == [[4, 2], [7, 1], [3, 0]]
    assert batch.sample_rows.tolist() == [4, 7]


def test_a_batch_that_fits_is_not_padded() -> None:
    batch = build_batch([Scheduled(make_sequence([1, 2, 3, 4], [0]), 0, 4)], 4, 4, CPU)
    assert batch.token_ids.tolist() == [1, 2, 3, 4]
    assert batch.token_ids.dtype == torch.int64
