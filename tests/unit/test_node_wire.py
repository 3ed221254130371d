"""A node trusts no router with its memory: what a start names is checked before it reaches the engine."""

import pytest

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import Leg
from kvrelay.node.wire import read_start
from kvrelay.proto import inference_pb2, node_pb2

V = 100


def start(**changes: object) -> node_pb2.Start:
    sampling = {"max_tokens": 4, "seed": 2**64 - 1, "repetition_penalty": 1.0} | changes.pop("sampling", {})  # type: ignore[operator]
    values = {
        "request_id": "r",
        "leg": node_pb2.Start.LEG_WHOLE,
        "prompt_token_ids": [1, V - 1],
        "timeout_s": 5.0,
        "sampling": inference_pb2.SamplingParams(**sampling),
    }
    return node_pb2.Start(**(values | changes))


def test_a_start_is_read_on_the_node_s_own_clock() -> None:
    read = read_start(start(output_token_ids=[7], cache_salt="s", priority=-2), now=100.0, vocab_size=V)
    assert read.leg is Leg.WHOLE
    request = read.request
    assert (request.arrival, request.deadline) == (100.0, 105.0)
    assert (request.prompt_token_ids, request.output_token_ids) == ((1, V - 1), (7,))
    assert (request.sampling.seed, request.cache_salt, request.priority) == (2**64 - 1, "s", -2)


@pytest.mark.parametrize(
    "changes",
    [
        {"leg": node_pb2.Start.LEG_UNSPECIFIED},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [V]},
        {"output_token_ids": [2**32 - 1]},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"min_tokens": -1}},
        {"sampling": {"top_k": -1}},
        {"sampling": {"repetition_penalty": 0.0}},
        {"sampling": {"repetition_penalty": float("nan")}},
        {"sampling": {"logit_bias": {V: 1.0}}},
        {"sampling": {"logit_bias": {-1: 1.0}}},
    ],
)
def test_what_would_upset_the_engine_is_refused(changes: dict[str, object]) -> None:
    """D04."""
    with pytest.raises(InvalidArgument):
        read_start(start(**changes), now=0.0, vocab_size=V)
