"""P and D with unlike pools: other block sizes give one engine's tokens bit for bit; other dtypes are handed over."""

import pytest
import torch
from support.oracle import Oracle, make_request, random_prompt
from support.pair import MakePair

from kvrelay.connector.transit import agree_transit
from kvrelay.engine.kv_layout import blocks_for

SIZES = [(8, 16), (16, 8), (8, 32), (32, 8), (16, 32), (32, 16), (12, 16)]
LENGTHS = [1, 8, 17, 33, 63, 64, 100]
QUANTISED = ["int8", "fp8", "bfloat16"]


@pytest.mark.parametrize(("p_size", "d_size"), SIZES)
def test_unlike_block_sizes_give_the_tokens_of_one_engine(
    make_pair: MakePair, tiny_oracle: Oracle, p_size: int, d_size: int
) -> None:
    """A01, A03: cold, then with what each node's cache holds of it; only what D lacks travels. Digests are on."""
    pair = make_pair(prefill={"block_size": p_size}, decode={"block_size": d_size})
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        expected = tiny_oracle.generate(prompt, ignore_eos=True, max_tokens=12)
        for name, num_cached in (("cold", 0), ("warm", length // d_size)):
            request = make_request(prompt, f"{name} {length}", ignore_eos=True, max_tokens=12)
            answer = pair.run(request)
            assert not answer.errors
            assert answer.tokens == expected, (length, num_cached)
            handoff = answer.reports["decode"].handoff
            assert handoff is not None
            assert handoff.cached_blocks == num_cached
            assert handoff.kv_blocks == blocks_for(length, d_size) - num_cached
            assert handoff.kv_bytes == handoff.kv_blocks * pair.runners[1].layout.block_bytes


@pytest.mark.parametrize(("p_size", "d_size"), [(8, 32), (32, 8)])
def test_prefixes_that_end_inside_a_block_of_the_other_node(
    make_pair: MakePair, tiny_oracle: Oracle, p_size: int, d_size: int
) -> None:
    """Each node finds what its own blocks hold of a prompt's beginning; the rest is computed, or travels."""
    pair = make_pair(prefill={"block_size": p_size}, decode={"block_size": d_size})
    prompt = random_prompt(90)
    for i, shared in enumerate((24, 40, 63, 88)):
        pair.wait(pair.start(make_request(prompt[:shared], f"p{i}", max_tokens=1), legs=["prefill"]))
        pair.run(make_request(prompt[: shared - 7], f"d{i}", max_tokens=1), whole=True)
        tail = random_prompt(20, seed=i)
        answer = pair.run(make_request([*prompt[:shared], *tail], f"r{i}", ignore_eos=True, max_tokens=6))
        assert answer.tokens == tiny_oracle.generate([*prompt[:shared], *tail], ignore_eos=True, max_tokens=6)
        handoff = answer.reports["decode"].handoff
        assert handoff is not None
        assert handoff.cached_blocks >= (shared - 7) // d_size


def test_several_at_once_do_not_mix(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    pair = make_pair(prefill={"block_size": 32}, decode={"block_size": 8})
    requests = [
        make_request(random_prompt(length, seed=7), f"beside {length}", ignore_eos=True, max_tokens=8)
        for length in (3, 17, 33, 40, 64, 90)
    ]
    for request, answer in zip(requests, pair.run_all(requests), strict=True):
        assert answer.tokens == tiny_oracle.generate_all([request])[0]


def test_bfloat16_kv_is_widened_exactly(make_pair: MakePair) -> None:
    """Each element of D's blocks is P's, in float32."""
    pair = make_pair(prefill={"dtype": "bfloat16"}, decode={"dtype": "float32", "block_size": 8})
    request = make_request(random_prompt(45), ignore_eos=True, max_tokens=2)
    answer = pair.run(request)
    assert not answer.errors
    pair.settle()
    layout_p, layout_d = (runner.layout for runner in pair.runners)
    (granted,) = pair.grants[request.key].ranges
    mine = _tokens(pair.runners[1], granted.block_ids)[:45]
    theirs = _tokens(pair.runners[0], pair.offers[request.key].block_ids)[:45]
    assert (layout_p.dtype, layout_d.dtype) == ("bfloat16", "float32")
    assert torch.equal(mine, theirs.float())
    handoff = answer.reports["decode"].handoff
    assert handoff is not None
    assert handoff.kv_bytes == len(granted.block_ids) * layout_d.block_bytes // 2


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_kv_is_handed_over_and_near(make_pair: MakePair, dtype: str) -> None:
    pair = make_pair(transfer_dtype=dtype, decode={"block_size": 8})
    request = make_request(random_prompt(45), ignore_eos=True, max_tokens=6)
    answer = pair.run(request)
    assert not answer.errors
    assert len(answer.tokens) == 6
    pair.settle()
    (granted,) = pair.grants[request.key].ranges
    mine = _tokens(pair.runners[1], granted.block_ids)[:45]
    theirs = _tokens(pair.runners[0], pair.offers[request.key].block_ids)[:45]
    largest = theirs.abs().amax(-1, keepdim=True)
    assert ((mine - theirs).abs() <= largest / {"int8": 250, "fp8": 15.9, "bfloat16": 255}[dtype]).all()
    assert not torch.equal(mine, theirs)
    transit = agree_transit(pair.runners[0].layout, pair.runners[1].layout, dtype)
    handoff = answer.reports["decode"].handoff
    assert handoff is not None
    assert handoff.kv_bytes == len(granted.block_ids) * transit.block_bytes


def _tokens(runner, block_ids) -> torch.Tensor:
    """[tokens, num_layers, 2, num_kv_heads, head_dim] of these blocks."""
    layout = runner.layout
    shape = (runner.num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    pool = torch.from_numpy(runner.region.reshape(-1)).view(getattr(torch, layout.dtype)).view(shape)
    return pool[list(block_ids)].movedim(4, 1).flatten(0, 1)
