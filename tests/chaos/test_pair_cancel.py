"""Requests that leave at any moment give every block back on both nodes, and no neighbour's token changes."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.oracle import Oracle, make_request
from support.pair import Pair

from kvrelay.engine.request import RequestKey

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_NEIGHBOURS, NUM_VICTIMS = 12, 60
CHUNK = {"max_num_batched_tokens": 32}
GROWING = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def pair(tiny_model: Path) -> Iterator[Pair]:
    """Pools that are often full: whatever is given back late or twice would be in somebody's way."""
    pair = Pair(tiny_model, prefill=CHUNK | {"num_blocks": 24}, decode=CHUNK | {"num_blocks": 28})
    yield pair
    pair.close()


def wait_for_a_moment(pair: Pair, key: RequestKey, rng: random.Random) -> str:
    """Let the request get some way: not at all, some steps of P, its first token, some tokens of D."""
    moment = rng.choice(["at once", "steps of P", "first token", "decoding"])
    if moment == "steps of P":
        target = pair.prefill.wait(lambda s: True).num_steps + rng.randrange(1, 6)
        pair.prefill.wait(lambda s: s.num_steps >= target or s.num_live == 0)
    elif moment == "first token":
        pair.wait_until(key, lambda answer: bool(answer.tokens))
    elif moment == "decoding":
        num_tokens = rng.randrange(2, 30)
        pair.wait_until(key, lambda answer: len(answer.tokens) >= num_tokens)
    return moment


@pytest.mark.parametrize("seed", range(3))
def test_cancels_at_random_moments_leave_no_block_and_change_no_neighbour(
    pair: Pair, tiny_oracle: Oracle, seed: int
) -> None:
    """A06, A07, B07: a late write never lands in another's block."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(10, 80))] for _ in range(NUM_NEIGHBOURS)]
    expected = [tiny_oracle.generate(prompt, **GROWING) for prompt in prompts]
    running: dict[int, RequestKey] = {}
    num_checked = 0
    for number in range(NUM_VICTIMS):
        index = number % NUM_NEIGHBOURS
        if index in running:
            assert pair.wait(running.pop(index)).tokens == expected[index]
            num_checked += 1
        running[index] = pair.start(make_request(prompts[index], f"neighbour-{number}", **GROWING))
        victim_prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 88))]
        victim = pair.start(make_request(victim_prompt, f"victim-{number}", **GROWING))
        wait_for_a_moment(pair, victim, rng)
        pair.cancel(victim)
    for index, key in running.items():
        assert pair.wait(key).tokens == expected[index]
    assert num_checked >= NUM_VICTIMS - NUM_NEIGHBOURS
    pair.settle()
