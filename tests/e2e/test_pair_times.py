"""What a node says of its times: a wait for the engine's step is a wait in its queue, and no part of the transfer."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_transport import FakeNetwork
from support.oracle import make_request, random_prompt
from support.pair import WAIT_S, Node, Pair

STOOD_S = 0.2


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def pair(tiny_model: Path, network: FakeNetwork) -> Iterator[Pair]:
    pair = Pair(tiny_model, network=network)
    yield pair
    pair.close()


@contextmanager
def in_a_long_step(node: Node) -> Iterator[None]:
    """As far as the rest of the node can tell."""
    begun, go_on = threading.Event(), threading.Event()
    node.post(lambda: (begun.set(), go_on.wait(WAIT_S)))  # type: ignore[func-returns-value]
    assert begun.wait(WAIT_S)
    try:
        yield
    finally:
        go_on.set()


def stand() -> None:
    time.sleep(STOOD_S)  # the time is what is measured


def test_a_prompt_that_comes_while_p_computes_has_waited_in_its_queue(pair: Pair) -> None:
    with in_a_long_step(pair.prefill):
        request = replace(make_request(random_prompt(40)), arrival=time.monotonic())
        key = pair.start(request)
        stand()
    report = pair.wait(key).reports["prefill"]
    assert report.queue_ms >= 1e3 * STOOD_S


def test_kv_that_lands_while_d_computes_has_waited_in_its_queue_and_not_on_the_way(
    pair: Pair, network: FakeNetwork
) -> None:
    network.hold()
    key = pair.start(make_request(random_prompt(40)))
    pair.decode.wait(lambda snapshot: snapshot.num_remote == 1)
    with in_a_long_step(pair.decode):
        while not pair.receiver.statistics().num_landed:
            network.deliver()
            time.sleep(0.001)
        stand()
    report = pair.wait(key).reports["decode"]
    assert report.queue_ms >= 1e3 * STOOD_S
    assert report.handoff is not None
    assert report.handoff.transfer_ms < 1e3 * WAIT_S
