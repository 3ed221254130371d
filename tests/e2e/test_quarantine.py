"""Blocks that a lost node may still write into: nobody gets them, the node says so, and they come back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.connector import wait_until
from support.fake_transport import FakeNetwork
from support.oracle import Oracle, make_request
from support.pair import Pair

from kvrelay.engine.request import RequestKey

BLOCK = 16
POOL = {"num_blocks": 6}  # room for one of the prompts below, not for two
VICTIM, NEXT = list(range(4 * BLOCK)), list(range(100, 100 + 4 * BLOCK))
SMALL = [7, 8, 9]


@pytest.fixture
def network() -> FakeNetwork:
    network = FakeNetwork()
    network.is_one_sided = network.writers_stay = True
    return network


@pytest.fixture
def pair(tiny_model: Path, network: FakeNetwork) -> Iterator[Pair]:
    pair = Pair(tiny_model, prefill=POOL, decode=POOL, network=network)
    try:
        yield pair
        pair.settle()
    finally:
        pair.close()


def lose(pair: Pair, network: FakeNetwork) -> RequestKey:
    """A hand-off whose session D loses while P's writer is inside a block."""
    victim = pair.start(make_request(VICTIM, "victim"))
    wait_until(lambda: network.links[0].inside is not None)
    peer = pair.receiver._peers[pair.prefill.epoch]  # type: ignore[attr-defined]
    pair.receiver._acceptor.close_session(peer.session, "the test cut it")  # type: ignore[attr-defined]
    return victim


def thaw(network: FakeNetwork) -> None:
    """P's writer leaves the block, so P says in its next HELLO that it is idle."""
    network.writers_stay = False
    network.links[0].leave()


def test_granted_blocks_of_a_lost_node_are_in_quarantine_and_come_back(
    pair: Pair, network: FakeNetwork, tiny_oracle: Oracle
) -> None:
    """A06, and HANDOFF's rule: counted and shown. The block for the next token was not granted, so it is free."""
    victim = lose(pair, network)
    assert pair.wait(victim).errors["decode"].retryable
    held = pair.decode.wait(lambda s: s.blocks.quarantined > 0)
    assert (held.blocks.quarantined, held.blocks.owned, held.blocks.free) == (4, 0, 2)
    assert held.is_healthy
    small = pair.run(make_request(SMALL, "small", ignore_eos=True), whole=True)
    assert small.tokens == tiny_oracle.generate(SMALL, ignore_eos=True)
    thaw(network)
    pair.decode.wait(lambda s: s.blocks.quarantined == 0)
    after = pair.run(make_request(NEXT, "after", ignore_eos=True), whole=True)
    assert after.tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


def test_what_cannot_go_on_for_quarantine_fails_to_be_tried_elsewhere_and_the_node_says_so(
    pair: Pair, network: FakeNetwork, tiny_oracle: Oracle
) -> None:
    lose(pair, network)
    pair.decode.wait(lambda s: s.blocks.quarantined > 0)
    waiting = pair.run(make_request(NEXT, "waiting", ignore_eos=True), whole=True)
    assert waiting.errors["decode"].code == "UNAVAILABLE"
    assert waiting.errors["decode"].retryable
    assert "quarantine" in str(waiting.errors["decode"])
    pair.decode.wait(lambda s: not s.is_healthy)
    thaw(network)
    pair.decode.wait(lambda s: s.is_healthy and s.blocks.quarantined == 0)
    after = pair.run(make_request(NEXT, "after", ignore_eos=True), whole=True)
    assert after.tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


def test_a_request_that_outgrows_what_quarantine_leaves_fails_too(pair: Pair, network: FakeNetwork) -> None:
    """It runs already, alone, and lacks a block for its next token."""
    lose(pair, network)
    pair.decode.wait(lambda s: s.blocks.quarantined > 0)
    growing = pair.run(make_request(SMALL, "growing", max_tokens=60, ignore_eos=True), whole=True)
    assert growing.errors["decode"].code == "UNAVAILABLE"
    assert len(growing.tokens) > BLOCK
    pair.decode.wait(lambda s: not s.is_healthy)
    thaw(network)


def test_what_another_node_may_still_bring_to_its_end_waits(
    pair: Pair, network: FakeNetwork, tiny_oracle: Oracle
) -> None:
    """Nothing fails while something advances: here a small request that decodes."""
    lose(pair, network)
    pair.decode.wait(lambda s: s.blocks.quarantined > 0)
    running = pair.start(make_request(SMALL, "running", max_tokens=20, ignore_eos=True), whole=True)
    pair.wait_until(running, lambda answer: bool(answer.tokens))
    waiting = pair.start(make_request(NEXT, "waiting", ignore_eos=True), whole=True)
    assert pair.wait(running).tokens == tiny_oracle.generate(SMALL, max_tokens=20, ignore_eos=True)
    assert "decode" in pair.wait(waiting).errors
    thaw(network)
