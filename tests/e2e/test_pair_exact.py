"""P and D together give one engine's tokens bit for bit: at every length, with every cache, in every company."""

import numpy as np
import pytest
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, CHUNK, MakePair

from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import FinishReason

LIMIT = 128
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK + 1, 3 * BLOCK + 5, 2 * CHUNK + 3, 5 * BLOCK, LIMIT - 1]


def fitting(length: int, max_tokens: int = 12) -> int:
    """As many output tokens as the context has room for."""
    return min(max_tokens, LIMIT - length)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_cold_pair_gives_the_tokens_of_one_engine(make_pair: MakePair, tiny_oracle: Oracle, length: int) -> None:
    prompt = random_prompt(length)
    max_tokens = fitting(length)
    pair = make_pair()
    answer = pair.run(make_request(prompt, ignore_eos=True, max_tokens=max_tokens))
    assert not answer.errors
    assert answer.tokens == tiny_oracle.generate(prompt, ignore_eos=True, max_tokens=max_tokens)
    assert len(answer.tokens) == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [BLOCK, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
@pytest.mark.parametrize("warm_p", [0, 1, 2, 5])
@pytest.mark.parametrize("warm_d", [0, 1, 2, 5])
def test_warm_caches_on_either_side_change_nothing(
    make_pair: MakePair, tiny_oracle: Oracle, length: int, warm_p: int, warm_d: int
) -> None:
    """A01, A02, A03: blocks are paired by position, and only those that D lacks travel; none is legal."""
    prompt = random_prompt(length)
    pair = make_pair()
    if warm_p:
        pair.wait(pair.start(make_request(prompt[: warm_p * BLOCK], "warm-p", max_tokens=1), legs=["prefill"]))
    if warm_d:
        pair.run(make_request(prompt[: warm_d * BLOCK], "warm-d", max_tokens=1), whole=True)
    answer = pair.run(make_request(prompt, ignore_eos=True))
    assert answer.tokens == tiny_oracle.generate(prompt, ignore_eos=True)
    handoff = answer.reports["decode"].handoff
    assert handoff is not None
    cached = min(warm_d, length // BLOCK)
    assert handoff.cached_blocks == cached
    assert handoff.kv_blocks == blocks_for(length, BLOCK) - cached
    assert handoff.kv_bytes == handoff.kv_blocks * pair.runners[0].layout.block_bytes
    assert answer.reports["prefill"].num_cached_tokens == min(warm_p, (length - 1) // BLOCK) * BLOCK


def test_the_same_prompt_fifty_times_leaves_no_block_behind(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """A02: a transfer of nothing still ends on both sides."""
    prompt = random_prompt(4 * BLOCK)
    pair = make_pair()
    expected = tiny_oracle.generate(prompt, max_tokens=4, ignore_eos=True)
    for i in range(50):
        answer = pair.run(make_request(prompt, f"again-{i}", max_tokens=4, ignore_eos=True))
        assert answer.tokens == expected
        handoff = answer.reports["decode"].handoff
        assert handoff is not None
        assert handoff.kv_blocks == (0 if i else 4)
        pair.settle()


def test_the_bytes_of_every_prompt_block_are_the_same_on_both_nodes(make_pair: MakePair) -> None:
    """What lies behind a prompt's end in its last block travels as zeros, whatever an earlier owner left there."""
    length = 3 * BLOCK + 5
    pair = make_pair(prefill={"num_blocks": 8})
    for i in range(3):  # every block of P is used before
        pair.run(make_request(random_prompt(5 * BLOCK, seed=i), f"before-{i}", max_tokens=1))
    request = make_request(random_prompt(length), "compared", max_tokens=2, ignore_eos=True)
    pair.run(request)
    pair.settle()
    (granted,) = pair.grants[request.key].ranges
    assert (granted.start, granted.end) == (0, length)
    shape = (3, 2, 2, BLOCK, 12)  # layers, keys and values, heads, slots, head_dim
    theirs, mine = (
        [runner.region[block_id].view(np.float32).reshape(shape) for block_id in block_ids]
        for runner, block_ids in zip(pair.runners, (pair.offers[request.key].block_ids, granted.block_ids), strict=True)
    )
    for full_on_p, full_on_d in zip(theirs[:3], mine[:3], strict=True):
        assert np.array_equal(full_on_p, full_on_d)
    assert np.array_equal(theirs[3][:, :, :, :5], mine[3][:, :, :, :5])
    assert not theirs[3][:, :, :, 5:].any()
    assert mine[3][:, :, :, 5].any()  # D's own: the first token's
    assert not mine[3][:, :, :, 6:].any()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_max_tokens_is_exact(make_pair: MakePair, tiny_oracle: Oracle, max_tokens: int) -> None:
    """A13."""
    prompt = random_prompt(20)
    pair = make_pair()
    answer = pair.run(make_request(prompt, max_tokens=max_tokens, ignore_eos=True))
    assert len(answer.tokens) == max_tokens
    assert answer.tokens == tiny_oracle.generate(prompt, max_tokens=max_tokens, ignore_eos=True)


def test_a_first_token_that_ends_the_request_costs_d_no_step(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """A12."""
    prompt = random_prompt(20)
    (first,) = tiny_oracle.generate(prompt, max_tokens=1)
    pair = make_pair()
    answer = pair.run(make_request(prompt, stop_token_ids=(first,)))
    assert answer.tokens == [first]
    assert answer.finish_reason is FinishReason.STOP
    assert not answer.errors
    assert answer.num_decode_deltas == 0
    assert pair.decode.wait(lambda s: s.num_live == 0).num_steps == 0


SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "ignore_eos": True, "max_tokens": 24}


def test_a_seeded_request_gives_the_same_tokens_in_any_company(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    prompt = random_prompt(37)
    expected = tiny_oracle.generate(prompt, seed=7, **SAMPLED)
    pair = make_pair()
    others = [
        make_request(random_prompt(5 + 11 * i, seed=i), f"other-{i}", seed=i, **(SAMPLED | {"max_tokens": 10 + i}))
        for i in range(7)
    ]
    for other in others[:4]:
        pair.start(other)
    beside = pair.start(make_request(prompt, "beside", seed=7, **SAMPLED))
    for other in others[4:]:
        pair.start(other)
    assert pair.wait(beside).tokens == expected
    for other in others:
        assert not pair.wait(other.key).errors
    assert pair.run(make_request(prompt, "alone", seed=7, **SAMPLED)).tokens == expected
    assert pair.run(make_request(prompt, "on-d", seed=7, **SAMPLED), whole=True).tokens == expected
    other_seed = pair.run(make_request(prompt, "other-seed", seed=8, **SAMPLED)).tokens
    assert other_seed != expected


@pytest.mark.parametrize("swap_space", ["256MiB", "0"])
def test_preempted_requests_give_the_same_tokens(make_pair: MakePair, tiny_oracle: Oracle, swap_space: str) -> None:
    """B04: D's pool holds the prompts, but less than half of what grows from them."""
    sampling = SAMPLED | {"max_tokens": 60}
    prompts = [random_prompt(30, seed=i) for i in range(4)]
    pair = make_pair(decode={"num_blocks": 10, "swap_space": swap_space})
    answers = pair.run_all([make_request(p, f"r{i}", seed=i, **sampling) for i, p in enumerate(prompts)])
    for i, answer in enumerate(answers):
        assert not answer.errors
        assert answer.tokens == tiny_oracle.generate(prompts[i], seed=i, **sampling)
    assert pair.decode.wait(lambda s: s.num_live == 0).num_preemptions > 0


def test_a_resumed_request_goes_on_where_it_was(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    prompt = random_prompt(37)
    expected = tiny_oracle.generate(prompt, seed=7, **SAMPLED)
    pair = make_pair()
    for done in (1, 9, len(expected) - 1):
        answer = pair.run(make_request(prompt, f"resumed-{done}", output=expected[:done], seed=7, **SAMPLED))
        assert answer.tokens == expected


PENALISED = SAMPLED | {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((5, 3.0), (9, -100.0)),
}


def test_penalties_count_the_same_tokens_on_either_node(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """Through both legs, on one node, and for a request that is resumed: prompt and output stay apart."""
    prompt = random_prompt(37)
    expected = tiny_oracle.generate(prompt, seed=7, **PENALISED)
    assert expected != tiny_oracle.generate(prompt, seed=7, **SAMPLED)
    pair = make_pair()
    assert pair.run(make_request(prompt, "apart", seed=7, **PENALISED)).tokens == expected
    assert pair.run(make_request(prompt, "whole", seed=7, **PENALISED), whole=True).tokens == expected
    resumed = make_request(prompt, "resumed", output=expected[:9], seed=7, **PENALISED)
    assert pair.run(resumed).tokens == expected


@pytest.mark.parametrize("swap_space", ["256MiB", "0"])
def test_penalties_survive_a_preemption(make_pair: MakePair, tiny_oracle: Oracle, swap_space: str) -> None:
    sampling = PENALISED | {"max_tokens": 60}
    prompts = [random_prompt(30, seed=i) for i in range(4)]
    pair = make_pair(decode={"num_blocks": 14, "swap_space": swap_space})
    answers = pair.run_all([make_request(p, f"r{i}", seed=i, **sampling) for i, p in enumerate(prompts)])
    for i, answer in enumerate(answers):
        assert answer.tokens == tiny_oracle.generate(prompts[i], seed=i, **sampling)
    assert pair.decode.wait(lambda s: s.num_live == 0).num_preemptions > 0


def test_a_prefill_pool_of_two_prompts_serves_twenty_in_a_row(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """Source blocks stay until they are read; what has no room waits."""
    prompts = [random_prompt(4 * BLOCK + 3, seed=i) for i in range(20)]
    pair = make_pair(prefill={"num_blocks": 10}, decode={"num_blocks": 12})
    answers = pair.run_all([make_request(p, f"r{i}", ignore_eos=True) for i, p in enumerate(prompts)])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert not answer.errors
        assert answer.tokens == tiny_oracle.generate(prompt, ignore_eos=True)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make_pair: MakePair) -> None:
    pair = make_pair(decode={"num_blocks": 4})
    answer = pair.run(make_request(random_prompt(70), max_tokens=20))
    error = answer.errors["decode"]
    assert error.code == "INVALID_ARGUMENT"
    assert "this node has 4" in error.message
    pair.cancel(make_request([1]).key)
