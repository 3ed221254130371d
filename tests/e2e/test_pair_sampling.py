"""What a request may ask of its tokens is the same through P and D as on one engine: choices, log-probabilities,
processors, in any mixture, warm or cold, chunked, preempted, resumed."""

import random
from dataclasses import replace
from typing import Any

import pytest
from support.mixtures import random_request
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, MakePair
from support.same import assert_same

from kvrelay.engine.request import FinishReason, Request

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True, "max_tokens": 20}
EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 5 * BLOCK]


# --- choices


@pytest.mark.parametrize("length", EDGES)
def test_choices_share_the_prompt_and_are_those_of_one_engine(
    make_pair: MakePair, tiny_oracle: Oracle, length: int
) -> None:
    request = make_request(random_prompt(length), n=4, **SAMPLED)
    expected = tiny_oracle.answer(request)
    pair = make_pair()
    assert_same(pair.run(request), expected)
    pair.settle()
    whole = make_request(random_prompt(length), "whole", n=4, **SAMPLED)
    assert_same(pair.run(whole, whole=True), expected)
    outputs = {tuple(expected.token_ids(choice)) for choice in range(4)}
    assert len(outputs) == 4, "choices that do not differ"


def test_each_choice_can_be_had_again_by_itself(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """A choice depends on (seed, choice) alone, so that one that lost its node goes on where it was."""
    prompt = random_prompt(37)
    expected = tiny_oracle.answer(make_request(prompt, n=3, **SAMPLED))
    pair = make_pair()
    for choice in range(3):
        tokens = expected.token_ids(choice)
        for done in (1, 7, len(tokens) - 1):
            name = f"resumed-{choice}-{done}"
            request = make_request(prompt, name, output=tokens[:done], choice=choice, **SAMPLED)
            assert pair.run(request).tokens == tokens


@pytest.mark.parametrize("caching", [True, False])
def test_choices_beside_others_in_a_full_pool_stay_what_they_are(
    make_pair: MakePair, tiny_oracle: Oracle, caching: bool
) -> None:
    """B04: forks are preempted one by one, and each is recomputed by itself."""
    sampling = SAMPLED | {"max_tokens": 50}
    requests = [make_request(random_prompt(30, seed=i), f"r{i}", n=3, **sampling) for i in range(3)]
    pair = make_pair(
        decode={"num_blocks": 16, "prefix_caching": caching, "swap_space": "0"}, prefill={"prefix_caching": caching}
    )
    for request, answer in zip(requests, pair.run_all(requests), strict=True):
        assert_same(answer, tiny_oracle.answer(request))
    assert pair.decode.wait(lambda s: s.num_live == 0).num_preemptions > 0


def test_choices_that_end_with_their_first_token_leave_the_others_alone(
    make_pair: MakePair, tiny_oracle: Oracle
) -> None:
    """A12, for some of the choices, and for all."""
    prompt = random_prompt(20)
    first = [token.token_id for token in _firsts(tiny_oracle, make_request(prompt, n=4, **SAMPLED))]
    pair = make_pair()
    for i, stops in enumerate((first[:1], first[1:3], first[3:], first)):
        request = make_request(prompt, f"stops-{i}", n=4, stop_token_ids=tuple(stops), **SAMPLED)
        answer = pair.run(request)
        assert_same(answer, tiny_oracle.answer(request))
        assert [c.finish_reason for c in answer.choices.values()].count(FinishReason.STOP) >= len(stops)
    assert_same(
        pair.run(make_request(prompt, "one", n=4, **SAMPLED | {"max_tokens": 1})),
        tiny_oracle.answer(make_request(prompt, n=4, **SAMPLED | {"max_tokens": 1})),
    )


def test_a_choice_that_nobody_wants_any_more_frees_its_blocks_and_no_others(
    make_pair: MakePair, tiny_oracle: Oracle
) -> None:
    prompt = random_prompt(3 * BLOCK + 5)
    request = make_request(prompt, "wanted", n=3, **SAMPLED | {"max_tokens": 70})
    expected = tiny_oracle.answer(request)
    pair = make_pair()
    key = pair.start(request)
    pair.wait_until(key, lambda answer: len(answer.choices[1].tokens) > 2)
    pair.cancel(key, 1)
    shared, own = 3, 2  # two others go on: blocks shared by all, and what each has got by itself since
    pair.decode.wait(lambda s: s.blocks.owned >= shared + 2 * own and s.load.num_running == 2)
    answer = pair.wait(key)
    for choice in (0, 2):
        assert answer.choices[choice].tokens == expected.token_ids(choice)
    assert len(answer.choices[1].tokens) < 70


def test_a_choice_cancelled_before_its_kv_has_landed_never_runs(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    request = make_request(random_prompt(40), "late", n=3, **SAMPLED)
    expected = tiny_oracle.answer(request)
    pair = make_pair()
    key = pair.start(request, legs=["decode"])
    pair.cancel(key, 0)
    pair.cancel(key, 99)  # there is none
    pair.join(request, "prefill")
    answer = pair.wait(key)
    assert len(answer.choices[0].tokens) == 1  # P's
    for choice in (1, 2):
        assert answer.choices[choice].tokens == expected.token_ids(choice)


def test_a_request_whose_every_choice_is_cancelled_is_gone(make_pair: MakePair) -> None:
    pair = make_pair()
    for moment in ("landing", "running"):
        request = make_request(random_prompt(40), moment, n=2, **SAMPLED | {"max_tokens": 80})
        key = pair.start(request, legs=["decode"])
        if moment == "running":
            pair.join(request, "prefill")
            pair.wait_until(key, lambda answer: len(answer.choices[1].tokens) > 1)
        for choice in range(2):
            pair.cancel(key, choice)
        pair.decode.wait(lambda s: s.num_live == 0)
    pair.settle()


def test_a_choice_that_fails_ends_its_request_and_no_other(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """After one choice's first token every continuation is forbidden."""
    prompt = random_prompt(40)
    first = [token.token_id for token in _firsts(tiny_oracle, make_request(prompt, n=3, **SAMPLED))]
    assert first.count(first[1]) == 1
    forbidden = tuple((first[1], token_id) for token_id in range(tiny_oracle.info.vocab_size))
    other = make_request(random_prompt(30, seed=1), "other", n=2, **SAMPLED)
    pair = make_pair()
    key = pair.start(other)
    failed = pair.run(make_request(prompt, "failed", n=3, bad_word_ids=forbidden, **SAMPLED))
    assert failed.errors["decode"].code == "INTERNAL"
    assert "no token to choose" in failed.errors["decode"].message
    assert_same(pair.wait(key), tiny_oracle.answer(other))


def test_more_choices_than_a_node_has_seats_are_refused_with_the_numbers(make_pair: MakePair) -> None:
    """A17: P gives its blocks back at once."""
    pair = make_pair(decode={"max_num_seqs": 4})
    answer = pair.run(make_request(random_prompt(40), "many", n=5, **SAMPLED))
    assert answer.errors["decode"].code == "INVALID_ARGUMENT"
    assert "n = 5: this node runs 4 sequences at once" in answer.errors["decode"].message
    pair.cancel(make_request([1], "many").key)
    pair.settle()


# --- log-probabilities


@pytest.mark.parametrize("length", [1, 2, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 3])
def test_prompt_logprobs_do_not_depend_on_caches_chunks_or_nodes(
    make_pair: MakePair, tiny_oracle: Oracle, length: int
) -> None:
    """A15, C13: what the cache holds has no outputs to tell from, so it is computed again."""
    prompt = random_prompt(length)
    options = SAMPLED | {"prompt_logprobs": 3, "logprobs": 2, "max_tokens": 4, "n": 2}
    expected = tiny_oracle.answer(make_request(prompt, **options))
    assert len(expected.prompt_logprobs) == length
    pair = make_pair()
    for name in ("cold", "warm"):
        assert_same(pair.run(make_request(prompt, name, **options)), expected)
    for name in ("whole", "whole-warm"):
        assert_same(pair.run(make_request(prompt, name, **options), whole=True), expected)
    pair.settle()
    after = pair.run(make_request(prompt, "after", **SAMPLED))
    assert after.reports["prefill"].num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert_same(after, tiny_oracle.answer(make_request(prompt, **SAMPLED)))


def test_prompt_logprobs_survive_a_preemption(make_pair: MakePair, tiny_oracle: Oracle) -> None:
    """Each position is told once, however often a node had to start over."""
    urgent = [make_request(random_prompt(60, seed=9 + i), f"urgent-{i}", **SAMPLED, priority=-1) for i in range(2)]
    request = make_request(random_prompt(100), "slow", prompt_logprobs=1, **SAMPLED)
    pair = make_pair(decode={"num_blocks": 11, "max_num_batched_tokens": 8, "swap_space": "0"})
    key = pair.start(request, whole=True)
    pair.wait_until(key, lambda answer: len(answer.prompt_logprobs) > 20)
    others = [pair.start(other, whole=True) for other in urgent]
    assert_same(pair.wait(key), tiny_oracle.answer(request))
    for other, urgent_key in zip(urgent, others, strict=True):
        assert_same(pair.wait(urgent_key), tiny_oracle.answer(other))
    assert pair.decode.wait(lambda s: s.num_live == 0).num_preemptions > 0


# --- everything at once


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_requests_gets_what_each_gets_alone(make_pair: MakePair, tiny_oracle: Oracle, seed: int) -> None:
    """Through P and D, on D alone, with room and without; each alone on one engine is the oracle."""
    rng = random.Random(seed)
    requests = [random_request(rng, i) for i in range(24)]
    pair = make_pair(decode={"num_blocks": rng.choice([16, 64])})
    keys = [pair.start(request, whole=rng.random() < 0.2) for request in requests]
    for request, key in zip(requests, keys, strict=True):
        assert_same(pair.wait(key), tiny_oracle.answer(request))


@pytest.mark.parametrize("seed", range(3))
def test_any_choice_resumes_to_the_same_end(make_pair: MakePair, tiny_oracle: Oracle, seed: int) -> None:
    """Whatever is counted over the output so far is counted on."""
    rng = random.Random(f"resume-{seed}")
    pair = make_pair()
    for i in range(12):
        request = random_request(rng, i)
        for choice, tokens in tiny_oracle.answer(request).choices.items():
            if len(tokens) < 2:
                continue
            done = rng.randrange(1, len(tokens))
            resumed = _resume(request, choice, [token.token_id for token in tokens[:done]])
            answer = pair.run(resumed)
            assert answer.tokens == [token.token_id for token in tokens]
            assert answer.choice.logprobs == [t.logprobs for t in tokens[done:] if t.logprobs is not None]
            assert answer.finish_reason == tokens[-1].finish_reason


def _firsts(oracle: Oracle, request: Request) -> list[Any]:
    return [tokens[0] for _, tokens in sorted(oracle.answer(request).choices.items())]


def _resume(request: Request, choice: int, output: list[int]) -> Request:
    key = request.key._replace(request_id=f"{request.key.request_id}-{choice}")
    sampling = replace(request.sampling, n=1, prompt_logprobs=None)
    return replace(request, key=key, sampling=sampling, choice=choice, output_token_ids=tuple(output))
