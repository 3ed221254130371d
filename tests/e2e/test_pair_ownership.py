"""The transfer owns its blocks: on neither node does another request get one that is still being read or written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.connector import wait_until
from support.fake_transport import FakeNetwork
from support.oracle import Oracle, make_request
from support.pair import Pair

from kvrelay.connector.base import Handover
from kvrelay.engine.request import FinishReason, Logprobs, OutputToken, RequestKey

BLOCK = 16
POOL = {"num_blocks": 6}  # room for one of the prompts below, not for two
VICTIM, NEXT = list(range(4 * BLOCK)), list(range(100, 100 + 4 * BLOCK))


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def pair(tiny_model: Path, network: FakeNetwork) -> Iterator[Pair]:
    pair = Pair(tiny_model, prefill=POOL, decode=POOL, network=network)
    try:
        yield pair
        pair.settle()
    finally:
        pair.close()


def test_blocks_of_p_stay_while_the_writer_reads_them(pair: Pair, network: FakeNetwork, tiny_oracle: Oracle) -> None:
    """A07."""
    network.writers_stay = True
    victim = pair.start(make_request(VICTIM, "victim"))
    (link,) = network.links
    wait_until(lambda: link.inside is not None)
    pair.cancel(victim)
    wait_until(lambda: pair.sender.statistics().states.get("DRAINING") == 1)
    network.writers_stay = False
    after = pair.start(make_request(NEXT, "after", ignore_eos=True))
    held = pair.prefill.wait(lambda s: s.load.num_waiting == 1)
    assert held.blocks.owned == 4
    link.leave()
    assert pair.wait(after).tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


def test_blocks_of_d_stay_while_the_reader_writes_them(pair: Pair, network: FakeNetwork, tiny_oracle: Oracle) -> None:
    """A06: what comes late lands in nobody's block."""
    network.stays_in_piece = True
    victim = pair.start(make_request(VICTIM, "victim"))
    wait_until(lambda: pair.receiver.statistics().states.get("COMMIT_SEEN") == 1)
    pair.cancel(victim)
    wait_until(lambda: pair.receiver.statistics().states.get("STOPPING") == 1)
    after = pair.start(make_request(NEXT, "after", ignore_eos=True))
    held = pair.decode.wait(lambda s: s.load.num_waiting == 1)
    assert held.blocks.owned == 5
    network.leave_piece()
    assert pair.wait(after).tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


def test_a_transfer_that_fails_ends_its_request_and_no_other(
    pair: Pair, network: FakeNetwork, tiny_oracle: Oracle
) -> None:
    network.hold()
    lost = pair.start(make_request(VICTIM[:BLOCK], "lost"))
    pair.wait_until(lost, lambda answer: bool(answer.tokens))
    network.fail()
    answer = pair.wait(lost)
    assert answer.errors["decode"].code == "UNAVAILABLE"
    assert answer.errors["decode"].retryable
    network.is_held = False
    # P dials again by itself: a new session has a new link.
    wait_until(lambda: len(network.links) == 2 and pair.decode.epoch in pair.sender.statistics().sessions)
    after = pair.run(make_request(NEXT, "after", ignore_eos=True))
    assert after.tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


def test_a_grant_that_is_late_holds_up_no_computing(pair: Pair, network: FakeNetwork, tiny_oracle: Oracle) -> None:
    """P computes while D has no room; its first token is out before a byte has moved."""
    blocker = pair.start(make_request(VICTIM, "blocker", max_tokens=30, ignore_eos=True), whole=True)
    pair.wait_until(blocker, lambda answer: bool(answer.tokens))
    late = pair.start(make_request(NEXT, "late", ignore_eos=True))
    pair.wait_until(late, lambda answer: len(answer.tokens) == 1)
    assert pair.wait(blocker).tokens == tiny_oracle.generate(VICTIM, max_tokens=30, ignore_eos=True)
    assert pair.wait(late).tokens == tiny_oracle.generate(NEXT, ignore_eos=True)


@pytest.mark.parametrize(
    "first_tokens",
    [
        (OutputToken(choice=0, token_id=10**6),),
        (OutputToken(choice=1, token_id=1),),
        (OutputToken(choice=0, token_id=1), OutputToken(choice=1, token_id=1)),
        (OutputToken(choice=0, token_id=1, finish_reason=FinishReason.STOP),),
        (OutputToken(choice=0, token_id=1, logprobs=Logprobs((1,), (0.0,))),),
    ],
)
def test_a_handover_that_makes_no_sense_ends_its_request_alone(
    pair: Pair, tiny_oracle: Oracle, first_tokens: tuple[OutputToken, ...]
) -> None:
    commit = pair.sender.commit

    def forged(key: RequestKey, handover: Handover) -> None:
        commit(key, replace(handover, first_tokens=first_tokens) if key.request_id == "forged" else handover)

    pair.sender.commit = forged  # type: ignore[method-assign]
    answer = pair.run(make_request(VICTIM[:BLOCK], "forged"))
    assert answer.errors["decode"].code == "INTERNAL"
    after = pair.run(make_request(NEXT, "after", ignore_eos=True))
    assert after.tokens == tiny_oracle.generate(NEXT, ignore_eos=True)
