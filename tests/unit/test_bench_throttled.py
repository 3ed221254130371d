"""bench/throttled.py: what it makes of a run."""

import pytest
from throttled import row, table

from kvrelay.prefill_node.bench import PrefillFigures


@pytest.mark.parametrize(
    ("mb_per_s", "end_to_end_ms", "send_s", "of_the_larger"),
    [(100.0, 2200.0, 1.84, 1.1), (15.0, 13000.0, 184 / 15, 13 * 15 / 184), (0.0, 2000.0, 0.0, 1.0)],
)
def test_a_run_is_held_against_the_larger_of_computing_and_sending(mb_per_s, end_to_end_ms, send_s, of_the_larger):
    found = row(mb_per_s, PrefillFigures([1.0], [1.0], [2000.0], [end_to_end_ms], 184_000_000))
    assert found["send_s"] == pytest.approx(send_s)
    assert found["of_the_larger"] == pytest.approx(of_the_larger)
    assert table([found])[1].split()[:2] == [f"{mb_per_s:g}" if mb_per_s else "-", "184"]
