"""Hand-offs through shared memory between real engines: not a token differs."""

from pathlib import Path

import pytest
from support.oracle import Oracle, make_request
from support.pair import making_pairs

from kvrelay.engine.shared_memory import why_not_huge

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 79, 100)


def test_prompts_of_any_length_give_the_tokens_of_one_engine(tiny_model: Path, tiny_oracle: Oracle) -> None:
    """A01: at once, so that blocks of many transfers lie between each other; then again, from D's prefix cache."""
    if reason := why_not_huge():
        pytest.skip(reason)
    prompts = [[(37 * length + i) % 90 for i in range(length)] for length in LENGTHS]
    expected = [tiny_oracle.generate(prompt, ignore_eos=True) for prompt in prompts]
    with making_pairs(tiny_model) as make_pair:
        pair = make_pair(shares_pool=True)
        for attempt in ("first", "again"):
            requests = [make_request(prompt, f"{attempt}-{len(prompt)}", ignore_eos=True) for prompt in prompts]
            answers = pair.run_all(requests)
            assert [answer.tokens for answer in answers] == expected
            handoffs = [answer.reports["decode"].handoff for answer in answers]
            assert {handoff.transport for handoff in handoffs if handoff is not None} == {"shm"}
            assert None not in handoffs
