"""The models that come by name, through P and D: one engine's tokens to the bit, and an answer that makes sense."""

import random

import pytest
from support.oracle import Oracle, make_request
from support.pair import Pair
from tokenizers import Tokenizer

from kvrelay.engine import model_store

pytestmark = [pytest.mark.model, pytest.mark.slow]

NODE = {"dtype": "bfloat16", "max_num_batched_tokens": 128, "num_blocks": 96}
# Gemma 3 270M comes as its base model: it goes on with a text.
PROMPTS = {
    "smollm2": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "gemma3-270m": "Question: What is the capital of France?\nAnswer:",
}
WINDOW = 512  # of most of Gemma's layers


@pytest.mark.parametrize("name", PROMPTS)
def test_a_model_answers_through_both_nodes_as_one_engine_does(name: str) -> None:
    """F03, F05: a GGUF file's tensors, tokenizer and windows are right, within the window and beyond."""
    folder = model_store.resolve(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPTS[name]).ids
    rng = random.Random(0)
    long = [*prompt[:1], *(rng.randrange(1000, 20_000) for _ in range(WINDOW + 60)), *prompt[1:]]
    requests = [make_request(prompt, "short", max_tokens=24), make_request(long, "long", max_tokens=8)]
    oracle = Oracle(folder, **NODE)
    expected = oracle.generate_all(requests)
    oracle.close()
    pair = Pair(folder, prefill=NODE, decode=NODE)
    try:
        answers = pair.run_all(requests)
        pair.settle()
    finally:
        pair.close()
    assert [answer.tokens for answer in answers] == expected
    assert "Paris" in tokenizer.decode(answers[0].tokens)
