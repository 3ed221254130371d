"""How scheduled tokens are laid out for the model."""

import pytest
import torch
from support.forward import CPU, make_sequence

from kvrelay.engine.batch import build_batch, prompt_positions
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


def test_prompt_rows_are_those_before_the_tokens_whose_log_probabilities_are_wanted() -> None:
    plain = make_sequence([1, 2, 3], [0])
    whole = make_sequence(range(5), [1, 2], prompt_logprobs=0)
    part = make_sequence(range(20), [3, 4, 5, 6, 7], prompt_logprobs=2)
    part.num_prompt_logprobs = 7
    batch = build_batch([Scheduled(plain, 0, 3), Scheduled(whole, 0, 5), Scheduled(part, 4, 9)], 4, 1, CPU)
    assert [list(prompt_positions(item)) for item in (Scheduled(whole, 0, 5), Scheduled(part, 4, 9))] == [
        [0, 1, 2, 3, 4],
        [7, 8, 9],
    ]
    assert batch.token_ids[batch.prompt_rows].tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert batch.prompt_rows.tolist() == [3, 4, 5, 6, 10, 11, 12]


@pytest.mark.parametrize("cuts", [[], [1], [4], [3, 4, 5], [6, 7], list(range(1, 9))])
def test_each_prompt_position_comes_once_however_the_prompt_is_cut(cuts: list[int]) -> None:
    sequence = make_sequence(range(7), [0, 1, 2], prompt_logprobs=1)
    sequence.token_ids += [7, 8]  # output
    found: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, 9], strict=True):
        positions = prompt_positions(Scheduled(sequence, start, end))
        found += positions
        sequence.num_prompt_logprobs += len(positions)
    assert found == list(range(7))


def test_prompt_positions_that_are_known_do_not_come_again_when_the_prompt_does() -> None:
    sequence = make_sequence(range(12), [0, 1, 2], prompt_logprobs=1)
    sequence.num_prompt_logprobs = 6
    found = [list(prompt_positions(Scheduled(sequence, i, i + 4))) for i in (0, 4)]
    assert found == [[], [6, 7, 8]]


def test_a_prompt_whose_rows_are_passed_over_is_our_own_bug() -> None:
    sequence = make_sequence(range(12), [0, 1, 2], prompt_logprobs=1)
    sequence.num_prompt_logprobs = 4
    assert prompt_positions(Scheduled(sequence, 3, 5)) == range(4, 6)
    with pytest.raises(AssertionError):
        prompt_positions(Scheduled(sequence, 4, 5))
