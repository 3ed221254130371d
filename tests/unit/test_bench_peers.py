"""bench/peers: what it asks both sides for."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of bench/peers by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_every_pass_of_a_batch_has_its_prompts_and_every_prefill_its_own(peers: Callable[[str], Any]) -> None:
    shape = peers("engine").Shape
    decode = list(shape.parse("decode:3:8", 20).passes(2, seed=0, vocab_size=100))
    prefill = list(shape.parse("prefill:8", 20).passes(2, seed=0, vocab_size=100))
    assert [asked["num_steps"] for asked in decode] == [4, 20, 20]
    assert [asked["num_steps"] for asked in prefill] == [0, 0, 0]
    assert [[len(prompt) for prompt in asked["prompts"]] for asked in decode] == [[8] * 3] * 3
    assert decode[0]["prompts"] == decode[1]["prompts"] == decode[2]["prompts"]
    assert len({tuple(asked["prompts"][0]) for asked in prefill}) == 3
    assert decode == list(shape.parse("decode:3:8", 20).passes(2, seed=0, vocab_size=100))


@pytest.mark.parametrize("text", ["decode:8", "prefill", "prefill:512:1", "decode:x:16", "encode:8:16", ""])
def test_a_shape_that_is_none_says_what_is_expected(peers: Callable[[str], Any], text: str) -> None:
    with pytest.raises(SystemExit, match="expected decode:BATCH:CONTEXT or prefill:TOKENS"):
        peers("engine").Shape.parse(text, 128)
