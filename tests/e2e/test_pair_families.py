"""Every family through P and D: log-probabilities are transformers', tokens one engine's, warm and cold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES, WINDOW, make_model
from support.oracle import Oracle, make_request, random_prompt
from support.pair import Pair, making_pairs

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 3.5, 5.0, 8.0],
}
# Their keys are not Llama's: windows, two ropes, layers without one, scaled positions.
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "cohere2": {},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
}
LENGTHS = (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 90)


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Oracle]]:
    """A family's nodes, and one engine by itself whose every answer begins with an empty prefix cache."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(folder, request.param, **CASES[request.param])
    oracle = Oracle(folder)
    with making_pairs(folder) as make:
        yield make(), oracle
    oracle.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_twice_gives_the_tokens_of_one_engine_without_a_cache(
    served: tuple[Pair, Oracle], length: int
) -> None:
    """F05, F06: the second time from the prefix caches of both nodes, and then another text behind the same prefix."""
    pair, oracle = served
    prompt = random_prompt(length)
    other = prompt[: length // 2] + random_prompt(length // 2, seed=1)
    for name, tokens in (("first", prompt), ("again", prompt), ("other", other)):
        answer = pair.run(make_request(tokens, f"{name} {length}", ignore_eos=True, max_tokens=20))
        assert not answer.errors
        assert answer.tokens == oracle.generate(tokens, ignore_eos=True, max_tokens=20)
        if name == "again" and length > 2 * WINDOW:
            assert answer.reports["prefill"].num_cached_tokens > WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_as_likely_as_in_transformers(family: str, tmp_path: Path) -> None:
    """F02, F05: the prompt's log-probabilities are P's, in chunks; the output's are D's, over the KV that P sent."""
    model = make_model(tmp_path, family)
    prompt = random_prompt(3 * WINDOW + 5)
    with making_pairs(tmp_path) as make:
        sampling = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
        answer = make().run(make_request(prompt, max_tokens=40, **sampling))
    assert not answer.errors
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0].float()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor([*prompt, *answer.tokens])[1:, None])[:, 0]
    found = [entry.logprobs[0] for entry in (*answer.prompt_logprobs[1:], *answer.choice.logprobs)]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-3 * max(1.0, float(logits.std())))
