"""The hand-off's tables, walked in full."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.connector.handoff import SENDER, A, E, R, S, receiver_table, render_mermaid, step

TABLES = [
    pytest.param(SENDER, S, id="sender"),
    pytest.param(receiver_table(one_sided=False), R, id="two_sided"),
    pytest.param(receiver_table(one_sided=True), R, id="one_sided"),
]


@pytest.mark.parametrize(("table", "states"), TABLES)
def test_every_pair_is_a_listed_step_or_is_ignored(table, states):
    for state, event in itertools.product(states, E):
        after, actions = step(table, state, event)
        if (state, event) in table:
            assert (after, actions) == table[state, event]
        else:
            assert (after, actions) == (state, ())


@pytest.mark.parametrize(("table", "states"), TABLES)
def test_blocks_are_given_back_only_on_the_way_to_the_end(table, states):
    for after, actions in table.values():
        if A.FREE in actions:
            assert after == "CLOSED"


@pytest.mark.parametrize(("table", "states"), TABLES)
def test_from_every_state_with_blocks_each_way_to_the_end_gives_them_back_or_starts_the_request(table, states):
    holding = {"OFFERED", "SENDING", "DRAINING", "COMMITTED"} if states is S else set()
    holding |= {"GRANTED", "COMMIT_SEEN", "BYTES_IN", "STOPPING", "REVOKED", "QUARANTINED"}
    for (state, _event), (after, actions) in table.items():
        if state in holding and after in ("CLOSED", "LANDED"):
            assert (A.FREE in actions) != (A.START_REQUEST in actions), (state, after)


def test_a_late_ack_frees_nothing():
    assert step(SENDER, S.CLOSED, E.ACK) == (S.CLOSED, ())
    assert step(SENDER, S.DRAINING, E.ACK) == (S.DRAINING, ())


def test_nothing_leaves_the_closed_or_the_landed_state():
    for (state, _event), (after, _actions) in receiver_table(one_sided=False).items():
        assert state != "LANDED"
        assert state != "CLOSED" or after == "CLOSED"
    assert not any(state is S.CLOSED for state, _event in SENDER)


def test_the_diagram_shows_every_row():
    diagram = render_mermaid()
    for table in (SENDER, receiver_table(one_sided=False), receiver_table(one_sided=True)):
        for (state, event), (after, _actions) in table.items():
            assert f"{state} --> {after}: {event}" in diagram


def test_the_module_prints_the_diagram():
    printed = subprocess.run(
        [sys.executable, "-m", "kvrelay.connector.handoff"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == render_mermaid() + "\n"


def test_the_architecture_page_shows_the_tables_as_they_are():
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    assert render_mermaid() in page.read_text(), "paste what `python -m kvrelay.connector.handoff` prints"
