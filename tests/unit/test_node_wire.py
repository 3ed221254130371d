"""A node trusts no router with its memory: what a start names is checked before it reaches the engine."""

from dataclasses import asdict, replace

import pytest

from kvrelay.connector.base import ConnectorStatistics
from kvrelay.engine.block_pool import BlockCounts
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import MAX_CHOICES, MAX_LOGPROBS, CacheChange, Delta, Leg, Load
from kvrelay.engine.metrics import ProcessStatistics
from kvrelay.engine.request import Logprobs, RequestKey
from kvrelay.engine.swap_space import SwapStatistics
from kvrelay.node.report import Snapshot
from kvrelay.node.wire import read_start, write_stats, write_step
from kvrelay.proto import inference_pb2, node_pb2

V = 100
SNAPSHOT = Snapshot(
    blocks=BlockCounts(9, 4, 3, 2, 0),
    load=Load(num_free_blocks=7),
    transfers=ConnectorStatistics(states={}, sessions={"p": "zmq"}),
)


def start(**changes: object) -> node_pb2.Start:
    sampling = {"max_tokens": 4, "seed": 2**64 - 1, "repetition_penalty": 1.0, "n": 1} | changes.pop("sampling", {})  # type: ignore[operator]
    values = {
        "request_id": "r",
        "leg": node_pb2.Start.LEG_WHOLE,
        "prompt_token_ids": [1, V - 1],
        "timeout_s": 5.0,
        "sampling": inference_pb2.SamplingParams(**sampling),
    }
    return node_pb2.Start(**(values | changes))


def test_a_start_is_read_on_the_node_s_own_clock() -> None:
    words = [inference_pb2.TokenIds(ids=[1, 2]), inference_pb2.TokenIds(ids=[V - 1])]
    message = start(output_token_ids=[7], cache_salt="s", priority=-2, bad_word_ids=words, choice=3)
    read = read_start(message, now=100.0, vocab_size=V)
    assert read.leg is Leg.WHOLE
    request = read.request
    assert (request.arrival, request.deadline) == (100.0, 105.0)
    assert (request.prompt_token_ids, request.output_token_ids, request.choice) == ((1, V - 1), (7,), 3)
    assert request.sampling.bad_word_ids == ((1, 2), (V - 1,))
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (None, None)
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
        {"sampling": {"n": 0}},
        {"sampling": {"n": MAX_CHOICES + 1}},
        {"sampling": {"n": 2}, "output_token_ids": [1]},
        {"sampling": {"logprobs": -1}},
        {"sampling": {"logprobs": MAX_LOGPROBS + 1}},
        {"sampling": {"prompt_logprobs": MAX_LOGPROBS + 1}},
        {"bad_word_ids": [inference_pb2.TokenIds(ids=[1, V])]},
        {"bad_word_ids": [inference_pb2.TokenIds()]},
    ],
)
def test_what_would_upset_the_engine_is_refused(changes: dict[str, object]) -> None:
    """D04."""
    with pytest.raises(InvalidArgument):
        read_start(start(**changes), now=0.0, vocab_size=V)


def test_a_step_says_tokens_with_their_log_probabilities_and_the_prompt_s() -> None:
    said = Delta(
        key=RequestKey("r", 2),
        choice=3,
        first_token_index=5,
        token_ids=(7, 8),
        logprobs=(Logprobs((7, 1), (-0.5, -0.25)), Logprobs((8, 1), (-1.5, -0.125))),
        prompt_logprobs=(Logprobs(), Logprobs((4,), (-2.0,))),
        first_prompt_index=0,
    )
    (message,) = write_step((said,), SNAPSHOT, None)
    step = message.step
    assert step.load.num_free_blocks == 7
    (delta,) = step.deltas
    assert (delta.request_id, delta.attempt, delta.choice, delta.first_token_index) == ("r", 2, 3, 5)
    assert list(delta.token_ids) == [7, 8]
    assert [(list(p.token_ids), list(p.logprobs)) for p in delta.logprobs] == [
        ([7, 1], [-0.5, -0.25]),
        ([8, 1], [-1.5, -0.125]),
    ]
    assert [(list(p.token_ids), list(p.logprobs)) for p in delta.prompt_logprobs] == [([], []), ([4], [-2.0])]
    assert not delta.ended


def test_a_large_step_is_said_in_several_messages_none_too_large_for_a_stream() -> None:
    position = Logprobs(tuple(range(10**6, 10**6 + 65)), (-1.0,) * 65)
    deltas = tuple(Delta(key=RequestKey(f"r{i}", 0), prompt_logprobs=(position,) * 512) for i in range(20))
    messages = list(write_step((*deltas, Delta(key=RequestKey("last", 0), ended=True)), SNAPSHOT, None))
    assert [message.step.HasField("load") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert max(message.ByteSize() for message in messages) < 2**20 + 2**16
    said = [delta.request_id for message in messages for delta in message.step.deltas]
    assert said == [*(f"r{i}" for i in range(20)), "last"]
    (empty,) = write_step((), SNAPSHOT, None)
    assert empty.step.load.num_free_blocks == 7


def test_a_node_tells_what_lies_in_host_memory() -> None:
    swap = SwapStatistics(num_host_blocks=9, num_free_host_blocks=5, num_swapped=2, num_swapped_out=7, num_swapped_in=4)
    stats = write_stats("decode", "e", "d", replace(SNAPSHOT, num_preemptions=8, swap=swap), ProcessStatistics())
    assert stats.num_preemptions == 8
    assert {field.name: value for field, value in stats.swap.ListFields()} == asdict(swap)


def test_a_step_that_changes_nothing_in_the_cache_says_nothing_of_it() -> None:
    (message,) = write_step((), SNAPSHOT, None)
    assert not message.step.HasField("cache")


def test_a_change_in_the_cache_goes_with_the_tokens_of_its_step() -> None:
    change = CacheChange(evicted=frozenset([1]), stored=frozenset([2**64 - 1]))
    (message,) = write_step((Delta(key=RequestKey("r", 0), token_ids=(7,)),), SNAPSHOT, change)
    assert len(message.step.deltas) == 1
    cache = message.step.cache
    assert (cache.from_nothing, list(cache.evicted), list(cache.stored)) == (False, [1], [2**64 - 1])


def test_an_empty_cache_is_a_whole_one_too() -> None:
    (message,) = write_step((), SNAPSHOT, CacheChange(from_nothing=True))
    assert message.step.cache == node_pb2.CacheChange(from_nothing=True)


def test_a_cache_of_fifty_thousand_blocks_is_said_in_several_messages_what_is_evicted_first() -> None:
    evicted, stored = range(20_000), range(20_000, 70_000)
    change = CacheChange(from_nothing=True, evicted=frozenset(evicted), stored=frozenset(stored))
    messages = list(write_step((), SNAPSHOT, change))
    assert max(message.ByteSize() for message in messages) < 2**18
    assert [message.step.HasField("load") for message in messages] == [True] + [False] * (len(messages) - 1)
    pieces = [message.step.cache for message in messages]
    assert [piece.from_nothing for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    said = [("evicted", name) for piece in pieces for name in piece.evicted]
    said += [("stored", name) for piece in pieces for name in piece.stored]
    assert sorted(said) == [("evicted", name) for name in evicted] + [("stored", name) for name in stored]
    first_stored = next(i for i, piece in enumerate(pieces) if piece.stored)
    assert not any(piece.evicted for piece in pieces[first_stored + 1 :])
