"""The sampler's processors against transformers' own, where those exist."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampler import Sampler, SampleRow

V, NUM_PROMPT = 50, 6


def processed(logits: torch.Tensor, token_ids: list[int], **sampling: object) -> torch.Tensor:
    """What this row's processors make of its logits."""
    params = SamplingParams(max_tokens=9, seed=0, **sampling)  # type: ignore[arg-type]
    row = SampleRow(params, 0, token_ids, NUM_PROMPT)
    changed = logits.clone()
    for process in Sampler([])._processors(row):
        process(changed)
    return changed


@pytest.fixture
def logits() -> torch.Tensor:
    return 4 * torch.randn(V, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def token_ids() -> list[int]:
    return torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.2, 10.0])
def test_the_repetition_penalty_is_transformers_s(logits: torch.Tensor, token_ids: list[int], penalty: float) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), logits[None].clone())[0]
    assert torch.equal(processed(logits, token_ids, repetition_penalty=penalty), theirs)


def test_the_logit_bias_is_transformers_s(logits: torch.Tensor, token_ids: list[int]) -> None:
    bias = {3: 4.5, 17: -100.0, 49: 0.125}
    theirs = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    expected = theirs(torch.tensor([token_ids]), logits[None].clone())[0]
    assert torch.equal(processed(logits, token_ids, logit_bias=tuple(bias.items())), expected)


def test_presence_and_frequency_count_the_output_alone(logits: torch.Tensor, token_ids: list[int]) -> None:
    """As the OpenAI API defines them: mu - c * frequency - (c > 0) * presence."""
    counts = torch.bincount(torch.tensor(token_ids[NUM_PROMPT:]), minlength=V)
    expected = logits - counts * 0.5 - (counts > 0) * 1.5
    changed = processed(logits, token_ids, presence_penalty=1.5, frequency_penalty=0.5)
    assert torch.allclose(changed, expected)
    assert torch.equal(changed[counts == 0], logits[counts == 0])
