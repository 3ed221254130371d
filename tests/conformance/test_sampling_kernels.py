"""Every set of kernels draws the tokens, weighs the rows and finds the likeliest that `kernels/sampling.py` defines.

To the bit, for each kind of CPU that this one can stand for: two nodes must draw the same token.

Shapes: R rows, V vocabulary.
"""

import math
import random
from typing import cast

import numpy as np
import pytest
import torch
from support.kernel_sets import CPU_BUILDS, KERNEL_SETS, KernelSet, num_threads
from torch import Tensor

from kvrelay.engine.logprobs import token_logprobs
from kvrelay.kernels import sampling
from kvrelay.kernels.base import Draw, Kernels
from kvrelay.kernels.reference import ReferenceKernels

SIZES = (1, 2, 7, 8, 63, 64, 65, 331, 4097, 49_152, 200_003)
LEAST_SCORE, LARGEST_FLOAT = -43.5, torch.finfo(torch.float32).max


@pytest.fixture(params=[s for s in KERNEL_SETS if s.name != "reference"] + list(CPU_BUILDS), ids=lambda s: s.name)
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    return cast(KernelSet, request.param)


@pytest.fixture
def kernels(kernel_set: KernelSet) -> Kernels:
    return kernel_set.make()


def random_logits(chance: random.Random, num_rows: int, size: int) -> Tensor:
    """Smooth, or full of equals; some forbidden; some so far apart that float32 ends. The largest is finite."""
    logits_RV = torch.randn(num_rows, size) * chance.choice([1e-7, 0.1, 1.0, 4.0, 30.0])
    match chance.randrange(6):
        case 0:
            logits_RV = logits_RV.round()
        case 1:
            logits_RV = logits_RV.bfloat16().float()
        case 2:
            logits_RV[torch.rand(num_rows, size) < 0.5] = -math.inf
            logits_RV[:, chance.randrange(size)] = 0.25
        case 3:
            logits_RV[:] = chance.choice([0.0, -0.0, -7.25, LARGEST_FLOAT, -LARGEST_FLOAT])
        case 4:
            logits_RV[:, :: chance.choice([1, 3, 70])] = chance.choice([-LARGEST_FLOAT, LARGEST_FLOAT, 1e30, 0.0, -0.0])
    return logits_RV


def random_draw(chance: random.Random, num_rows: int, size: int) -> Draw:
    numbers = [0.0, 1 - 2**-52, *(chance.getrandbits(52) / 2**52 for _ in range(6))]
    return Draw(
        chance.randrange(num_rows),
        numbers,
        temperature=chance.choice([1e-5, 0.3, 0.7, 1.0, 1.0, 2.0, 1e3, 1e300, math.inf]),
        min_p=chance.choice([0.0, 0.0, 1e-12, 0.02, 0.5, 1.0]),
        top_k=chance.choice([0, 0, 1, 2, 50, size // 2, max(1, size - 1), size, 10**6]),
        top_p=chance.choice([1.0, 1.0, 1 - 2**-53, 0.999, 0.9, 0.5, 1e-9, 5e-324]),
    )


@pytest.mark.parametrize("size", SIZES)
def test_what_is_drawn_is_what_the_definition_says(kernels: Kernels, kernel_set: KernelSet, size: int) -> None:
    chance = random.Random(size)
    torch.manual_seed(size)
    for _ in range(4 if size > 10_000 else 25):
        logits_RV = random_logits(chance, 3, size)
        draws = [random_draw(chance, 3, size) for _ in range(7)]
        weights = [sampling.distribution(logits_RV[draw.row], draw) for draw in draws]
        expected = [sampling.draw(of, draw.numbers) for of, draw in zip(weights, draws, strict=True)]
        for threads in kernel_set.threads:
            with num_threads(threads):
                assert kernels.draw(logits_RV, draws) == expected


@pytest.mark.parametrize("size", [5, 64, 200, 1500])
def test_exactly_what_the_filters_keep_can_be_drawn(kernels: Kernels, size: int) -> None:
    """Every token at the first and the last number that it has."""
    chance = random.Random(size)
    torch.manual_seed(size)
    for _ in range(12):
        logits_RV = random_logits(chance, 1, size)
        shape = random_draw(chance, 1, size)
        weights = sampling.distribution(logits_RV[0], shape)
        ends = weights.cumsum(0)
        total = int(ends[-1])
        numbers = [min(int(end) / total, 1 - 2**-52) for end in ends.tolist()]
        numbers += [max(number - 2**-52, 0.0) for number in numbers]
        draw = Draw(0, numbers, shape.temperature, shape.min_p, shape.top_k, shape.top_p)
        (found,) = kernels.draw(logits_RV, [draw])
        assert found == sampling.draw(weights, numbers)
        assert set(found) <= set(weights.nonzero().flatten().tolist())


@pytest.mark.parametrize("top_k", [1, 3, 70, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_of_equals_the_lower_ids_are_kept(kernels: Kernels, top_k: int, top_p: float) -> None:
    logits_RV = torch.zeros(1, 1000)
    logits_RV[0, 1::2] = -0.0
    logits_RV[0, 900] = 1e-3
    numbers = [i / 4096 for i in range(4096)]
    (found,) = kernels.draw(logits_RV, [Draw(0, numbers, top_k=top_k, top_p=top_p)])
    num_kept = math.ceil(top_k * top_p)
    assert set(found) == {*range(num_kept - 1), 900}


def test_rows_beside_it_do_not_matter_even_without_a_number(kernels: Kernels) -> None:
    torch.manual_seed(5)
    logits_RV = torch.randn(5, 3000)
    draws = [Draw(row, [0.1, 0.5, 0.9], top_k=40, top_p=0.8) for row in range(5)]
    expected = kernels.draw(logits_RV, draws)
    spoiled = logits_RV.clone()
    spoiled[2], spoiled[4] = math.nan, math.inf
    assert kernels.draw(spoiled, [draws[3], draws[0], draws[1], draws[0]]) == [expected[i] for i in (3, 0, 1, 0)]
    assert kernels.draw(spoiled[1:2], [Draw(0, [0.1, 0.5, 0.9], top_k=40, top_p=0.8)]) == [expected[1]]
    assert kernels.draw(logits_RV[:, 100:900], draws[:1]) == kernels.draw(logits_RV[:, 100:900].clone(), draws[:1])
    assert kernels.draw(logits_RV, []) == []


@pytest.mark.parametrize("size", SIZES)
def test_totals_and_the_likeliest_are_those_of_the_definition(
    kernels: Kernels, kernel_set: KernelSet, size: int
) -> None:
    chance = random.Random(size)
    torch.manual_seed(size)
    for _ in range(3 if size > 10_000 else 10):
        logits_RV = random_logits(chance, 5, size)
        count = chance.choice([0, 1, min(size, 20), size // 2, size])
        totals = sampling.weigh(logits_RV - logits_RV.amax(-1, keepdim=True)).sum(-1)
        ids = sampling.likeliest(logits_RV, count)
        for threads in kernel_set.threads:
            with num_threads(threads):
                assert torch.equal(kernels.total_weights(logits_RV), totals)
                assert torch.equal(kernels.likeliest(logits_RV, count), ids)


def test_log_probabilities_are_the_references_to_the_bit(kernels: Kernels) -> None:
    torch.manual_seed(8)
    logits_RV = 4 * torch.randn(19, 4999)
    logits_RV[3, 77] = math.nan
    chosen, counts = [(i, 2 * i) for i in range(19)], [i % 7 for i in range(19)]
    found = token_logprobs(logits_RV, chosen, counts, kernels)
    assert found == token_logprobs(logits_RV, chosen, counts, ReferenceKernels())


def scores_between(first: float, last: float, step: int) -> Tensor:
    """Every `step`-th float32 of a range of negative ones, from the lower end up."""
    high, low = (int(np.float32(end).view(np.int32)) for end in (first, last))
    return torch.from_numpy(np.arange(high, low, -step, dtype=np.int32).view(np.float32).copy())


def test_a_larger_score_never_weighs_less_and_a_weight_is_exp() -> None:
    scores = torch.cat([scores_between(-50.0, -1e-12, 61), torch.tensor([-0.0, 0.0])])
    for start in range(0, len(scores), 1 << 20):
        piece = scores[start : start + (1 << 20) + 1]
        weights = sampling.weigh(piece[:, None])[:, 0]  # each a vocabulary of its own
        assert (weights.diff() >= 0).all()
        expected = piece.double().exp() * sampling.weight_of_one(1)
        expected[piece <= LEAST_SCORE] = 0
        assert ((weights - expected).abs() <= expected * 2.0**-26 + 1).all()


def test_a_weight_passes_every_power_of_two_without_a_step_back() -> None:
    """Where one polynomial's end meets the next one's beginning, all scores there are."""
    for power in range(1, 62):
        at = np.float32(-power * math.log(2)).view(np.int32)
        scores = torch.from_numpy(np.arange(at + 3000, at - 3000, -1, dtype=np.int32).view(np.float32).copy())
        assert (sampling.weigh(scores[:, None]).diff(dim=0) >= 0).all()


def test_kernels_weigh_every_score_like_the_definition(kernels: Kernels) -> None:
    """A row of two logits, 0 and the score, has a total that tells what the score weighs."""
    scores = scores_between(-46.0, -1e-11, 9973)
    logits_RV = torch.stack([torch.zeros_like(scores), scores], dim=1)
    assert torch.equal(kernels.total_weights(logits_RV), sampling.weigh(logits_RV).sum(-1))
