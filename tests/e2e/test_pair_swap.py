"""A request that gave way to others on D, by swap or by recompute, gives one engine's tokens bit for bit."""

from typing import Any

import numpy as np
import pytest
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, MakePair, Pair
from support.same import assert_same

from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.planner import StepPlan
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.step import Applied, RowResult, Scheduled

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True, "max_tokens": 60, "logprobs": 2}
BLOCK_BYTES = 9216  # of the tiny model
ROOMY, SCARCE, OFF = "256MiB", str(4 * BLOCK_BYTES), "0"


def requests(**sampling: Any) -> list[Request]:
    return [make_request(random_prompt(30, seed=i), f"r{i}", **SAMPLED | sampling) for i in range(4)]


def spy_on_rows(pair: Pair) -> list[int]:
    """Write down how many tokens each of D's rows computes."""
    rows: list[int] = []
    runner = pair.runners[1]
    execute = runner.execute

    def spied(scheduled: tuple[Scheduled, ...]) -> list[RowResult]:
        rows.extend(item.num_new_tokens for item in scheduled)
        return execute(scheduled)

    runner.execute = spied  # type: ignore[method-assign, assignment]
    return rows


def spy_on_kv(pair: Pair) -> list[int]:
    """Compare the KV of each sequence that is swapped in with what it was when it was swapped out. Returns a list that
    grows by the tokens compared."""
    scheduler, runner = pair.decode.core.engine.scheduler, pair.runners[1]
    apply, restored = scheduler.apply, scheduler.restored
    before: dict[Sequence, np.ndarray[Any, Any]] = {}
    compared: list[int] = []

    def kv(sequence: Sequence) -> np.ndarray[Any, Any]:
        """[tokens, layers, keys and values, heads, head_dim] of what it has computed."""
        layout, num_tokens = runner.layout, sequence.num_computed_tokens
        blocks = runner.region[sequence.block_table[: blocks_for(num_tokens, BLOCK)]].view(np.float32)
        shape = (-1, layout.num_layers, 2, layout.num_kv_heads, BLOCK, layout.head_dim)
        return np.moveaxis(blocks.reshape(shape), 4, 1).reshape(-1, *shape[1:4], layout.head_dim)[:num_tokens]

    def spied_apply(plan: StepPlan) -> Applied:
        before.update({sequence: kv(sequence).copy() for sequence in plan.swapped_out})
        return apply(plan)

    def spied_restored(sequence: Sequence) -> None:
        restored(sequence)
        assert np.array_equal(kv(sequence), before.pop(sequence)), sequence.key
        compared.append(sequence.num_computed_tokens)

    scheduler.apply, scheduler.restored = spied_apply, spied_restored  # type: ignore[method-assign]
    return compared


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("swap_space", [ROOMY, SCARCE, OFF])
@pytest.mark.parametrize("sampling", [{}, {"n": 3}], ids=["one-choice", "three-choices"])
def test_preempted_requests_give_the_same_tokens_however_they_gave_way(
    make_pair: MakePair, tiny_oracle: Oracle, sampling: dict[str, Any], swap_space: str, caching: bool
) -> None:
    """B04, with room for all in host memory, for some, and for none."""
    pair = make_pair(decode={"num_blocks": 16, "swap_space": swap_space, "prefix_caching": caching})
    compared, rows = spy_on_kv(pair), spy_on_rows(pair)
    wanted = requests(**sampling)
    for request, answer in zip(wanted, pair.run_all(wanted), strict=True):
        assert_same(answer, tiny_oracle.answer(request))
    snapshot = pair.decode.wait(lambda s: s.num_live == 0)
    swap = snapshot.swap
    assert swap.num_swapped_out == swap.num_swapped_in == len(compared)
    if swap_space == ROOMY:
        assert snapshot.num_preemptions == swap.num_swapped_out > 0
        assert set(rows) == {1}, "D has computed what P had computed, or what it had itself"
    elif swap_space == SCARCE:
        assert snapshot.num_preemptions > swap.num_swapped_out > 0
    else:
        assert snapshot.num_preemptions > swap.num_swapped_out == 0


@pytest.mark.parametrize("swap_space", [ROOMY, OFF])
def test_a_prompt_that_gives_way_half_computed_goes_on_where_it_was(
    make_pair: MakePair, tiny_oracle: Oracle, swap_space: str
) -> None:
    """The log-probabilities of its prompt are told once each, too."""
    urgent = make_request(random_prompt(60, seed=9), "urgent", priority=-1, **SAMPLED)
    slow = make_request(random_prompt(100), "slow", prompt_logprobs=1, **SAMPLED | {"max_tokens": 20})
    pair = make_pair(decode={"num_blocks": 9, "max_num_batched_tokens": 8, "swap_space": swap_space})
    rows, compared = spy_on_rows(pair), spy_on_kv(pair)
    key = pair.start(slow, whole=True)
    pair.wait_until(key, lambda answer: len(answer.prompt_logprobs) > 20)
    assert_same(pair.run(urgent, whole=True), tiny_oracle.answer(urgent))
    assert_same(pair.wait(key), tiny_oracle.answer(slow))
    num_needed = 60 + 59 + 100 + 19
    assert (sum(rows) == num_needed) == (swap_space == ROOMY)
    assert bool(compared) == (swap_space == ROOMY)
    if compared:
        assert compared[0] < 100, "it had its whole prompt"


@pytest.mark.parametrize("choice", [None, 1])
def test_a_swapped_request_that_is_cancelled_leaves_nothing_in_host_memory(
    make_pair: MakePair, tiny_oracle: Oracle, choice: int | None
) -> None:
    urgent = make_request(random_prompt(60, seed=9), "urgent", priority=-1, **SAMPLED)
    victim = make_request(random_prompt(40), "victim", n=2, **SAMPLED)
    pair = make_pair(decode={"num_blocks": 8})
    core, scheduler = pair.decode.core, pair.decode.core.engine.scheduler
    apply, swap_space = scheduler.apply, scheduler.swap_space
    num_taken: list[tuple[int, int]] = []

    def cancel() -> None:
        before = swap_space.num_free
        core.cancel(victim.key, choice)
        num_taken.append((swap_space.num_blocks - before, swap_space.num_blocks - swap_space.num_free))

    def spied_apply(plan: StepPlan) -> Applied:
        applied = apply(plan)
        if len(scheduler.swapped) == 2 and not num_taken:
            pair.decode.post(cancel)  # served before the next step
        return applied

    scheduler.apply = spied_apply  # type: ignore[method-assign]
    key = pair.start(victim)
    pair.wait_until(key, lambda answer: all(len(c.tokens) > 2 for c in answer.choices.values()))
    assert_same(pair.run(urgent, whole=True), tiny_oracle.answer(urgent))
    ((before, after),) = num_taken
    if choice is None:
        assert before > after == 0
    else:
        assert before > after > 0
        assert pair.wait(key).choices[0].tokens == tiny_oracle.answer(victim).token_ids(0)
