"""P and D with quantised weights give one engine's tokens bit for bit, cold and warm, alone and in company."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from support.families import make_model
from support.gguf_models import write_gguf
from support.oracle import Oracle, make_request, random_prompt
from support.pair import BLOCK, CHUNK, Pair, making_pairs

from kvrelay.engine.convert_gguf import convert

LENGTHS = (1, BLOCK, BLOCK + 1, CHUNK + 1, 2 * CHUNK + 3, 100)


@pytest.fixture(scope="module", params=["int8", "int4", "gguf"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Oracle]]:
    """Two nodes, and one engine by itself, in bfloat16; P computes on two threads."""
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_model(folder / "original", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=8)
    gguf = write_gguf(folder / "m.gguf", model, Kind.Q4_1)
    (folder / "back").mkdir()
    convert(gguf, folder / "back", progress=False)
    options: dict[str, Any] = {"quantization": request.param, "dtype": "bfloat16"}
    oracle = Oracle(folder / "back", gguf=gguf, **options)
    with making_pairs(folder / "back") as make:
        yield make(gguf=gguf, prefill=options | {"threads": 2}, decode=options), oracle
    oracle.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_pair_gives_the_tokens_and_probabilities_of_one_engine(served: tuple[Pair, Oracle], length: int) -> None:
    """Chunks on P, single rows on D, warm caches the second time: the same bits whatever is unpacked where."""
    pair, oracle = served
    prompt = random_prompt(length)
    sampling: dict[str, Any] = {"ignore_eos": True, "max_tokens": 20, "logprobs": 3}
    expected = oracle.answer(make_request(prompt, **sampling)).choices[0]
    for name in ("cold", "warm"):
        answer = pair.run(make_request(prompt, f"{name} {length}", **sampling))
        assert not answer.errors
        assert answer.tokens == [token.token_id for token in expected]
        assert answer.choice.logprobs == [token.logprobs for token in expected]


def test_requests_in_one_batch_do_not_change_each_other(served: tuple[Pair, Oracle]) -> None:
    pair, oracle = served
    requests = [
        make_request(random_prompt(length, seed=7), f"beside {length}", ignore_eos=True, max_tokens=12)
        for length in (3, 17, 33, 40, 64, 90)
    ]
    for request, answer in zip(requests, pair.run_all(requests), strict=True):
        assert answer.tokens == oracle.generate_all([request])[0]
