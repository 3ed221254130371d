"""A row's token does not depend on the rows beside it, and is one that its parameters allow."""

import math

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import Sampler, SampleRow

VOCAB_SIZE = 12
EOS = 3

rows = st.builds(
    SampleRow,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.just(20),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=st.integers(0, 4),
        temperature=st.sampled_from([0.0, 1e-7, 1e-5, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 1000]),
        top_p=st.sampled_from([1.0, 0.999, 0.5, 1e-6]),
        min_p=st.sampled_from([0.0, 0.01, 0.7, 1.0]),
        stop_token_ids=st.sampled_from([(), (0,), (5, 900)]),
        logit_bias=st.sampled_from([(), ((0, 3.5),), ((4, -100.0), (5, 100.0), (11, 0.25))]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5, 100.0]),
        presence_penalty=st.sampled_from([0.0, 1.25, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    ),
    choice=st.integers(0, 3),
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=5, max_size=200),
    num_prompt_tokens=st.integers(0, 5),
)


def random_logits(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, VOCAB_SIZE, generator=generator)
    return logits.mul_(4).round_().div_(4)  # so that some are equal


def allowed(logits: np.ndarray, row: SampleRow) -> set[int]:
    """The tokens that may come out, by the definitions, in float64."""
    params = row.sampling
    scores = logits.astype(np.float64)
    if row.num_output_tokens + 1 < params.min_tokens:
        scores[[i for i in (EOS, *params.stop_token_ids) if i < VOCAB_SIZE]] = -math.inf
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for token_id in set(row.token_ids):
        divided = scores[token_id] > 0
        scores[token_id] *= 1 / params.repetition_penalty if divided else params.repetition_penalty
    output = row.token_ids[row.num_prompt_tokens :]
    for token_id in set(output):
        scores[token_id] -= params.presence_penalty + output.count(token_id) * params.frequency_penalty
    if params.temperature < 1e-5:
        return {int(scores.argmax())}
    weights = np.exp((scores - scores.max()) / params.temperature)
    weights[weights < params.min_p * (1 - 1e-6)] = 0
    order = np.argsort(-weights, kind="stable")[: params.top_k or VOCAB_SIZE]
    before = np.concatenate([[0], weights[order].cumsum()[:-1]]) / weights[order].sum()
    kept = [int(i) for i, mass in zip(order, before, strict=True) if mass < params.top_p + 1e-6]
    return {i for i in kept if weights[i] > 0}


@settings(max_examples=150, deadline=None)
@given(st.lists(rows, min_size=1, max_size=8), st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_a_rows_token_is_the_same_alone_and_in_any_company(batch: list[SampleRow], seed: int, order: object) -> None:
    logits = random_logits(seed, len(batch))
    sampler = Sampler([EOS])
    alone = [sampler.sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(batch)]
    places = list(range(len(batch)))
    order.shuffle(places)  # type: ignore[attr-defined]
    together = sampler.sample(logits[places].clone(), [batch[i] for i in places])
    assert together == [alone[i] for i in places]
    for i, row in enumerate(batch):
        assert alone[i] in allowed(logits[i].numpy(), row)


@settings(max_examples=10, deadline=None)
@given(rows, st.integers(0, 1000))
def test_a_token_does_not_depend_on_the_number_of_threads(row: SampleRow, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 70_001, generator=generator)
    before = torch.get_num_threads()
    tokens = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        tokens += Sampler([EOS]).sample(logits.clone(), [row])
    torch.set_num_threads(before)
    assert tokens[0] == tokens[1] == tokens[2]
