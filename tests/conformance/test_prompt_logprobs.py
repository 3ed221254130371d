"""Log-probabilities of the prompt: those of transformers, and the same bits however the prompt was computed."""

import logging
import math
import os
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forward import make_sequence
from support.tiny_model import make_tiny_model

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import Internal
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.request import Logprobs, Sequence
from kvrelay.engine.step import Row, Scheduled

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BLOCK_SIZE = 16
BAD_TOKEN = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in which one token's embedding is NaN."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(read_model_info(folder), EngineConfig(num_blocks=60, threads=1))
    yield runner
    runner.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, BAD_TOKEN, (length,), generator=generator).tolist()


def prompt_logprobs(runner: ModelRunner, sequence: Sequence, cuts: Seq[int] = (), start: int = 0) -> list[Logprobs]:
    """Compute the rest of a sequence in pieces, keeping count as the engine does."""
    found: list[Logprobs] = []
    for begin, end in zip([start, *cuts], [*cuts, sequence.num_tokens], strict=True):
        (row,) = runner.execute([Scheduled(sequence, begin, end)])
        assert isinstance(row, Row)
        assert bool(row.sampled) == (end == sequence.num_tokens)
        sequence.num_prompt_logprobs += len(row.prompt_logprobs)
        found += row.prompt_logprobs
    return found


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 66, 127])
def test_they_are_those_of_transformers(runner: ModelRunner, folder: Path, length: int) -> None:
    """C13: at, below and above a multiple of the block size, and of the rows whose logits are computed at once."""
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prompt = prompt_of(length)
    found = prompt_logprobs(runner, make_sequence(prompt, range(8), prompt_logprobs=5))
    assert len(found) == length
    assert found[0] == Logprobs()
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([prompt])).logits[0]
    expected = logits.double().log_softmax(-1)
    for position in range(1, length):
        entry = found[position]
        assert entry.token_ids[0] == prompt[position]
        assert len(entry.token_ids) == len(entry.logprobs) == 6
        assert all(math.isfinite(value) for value in entry.logprobs)
        theirs = expected[position - 1]
        np.testing.assert_allclose(entry.logprobs, theirs[list(entry.token_ids)], atol=1e-3)
        np.testing.assert_allclose(entry.logprobs[1:], theirs.topk(5).values, atol=1e-3)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_their_bits_do_not_depend_on_how_the_prompt_is_cut(runner: ModelRunner, length: int) -> None:
    """C13."""
    prompt = prompt_of(length, seed=1)
    expected = prompt_logprobs(runner, make_sequence(prompt, [3, 1, 2], prompt_logprobs=3))
    for cuts in ([1], [16], [15, 16, 17], [30], list(range(1, length)), list(range(7, length, 7))):
        assert prompt_logprobs(runner, make_sequence(prompt, [9, 8, 7], prompt_logprobs=3), cuts) == expected


def test_their_bits_do_not_depend_on_what_is_computed_beside_them(runner: ModelRunner) -> None:
    prompts = [prompt_of(length, seed=length) for length in (40, 3, 100, 17, 1)]
    counts = [0, 20, 1, None, 3]
    tables = [range(8 * i, 8 * i + 8) for i in range(5)]
    sequences = [
        make_sequence(prompt, table, prompt_logprobs=count)
        for prompt, table, count in zip(prompts, tables, counts, strict=True)
    ]
    together = runner.execute([Scheduled(sequence, 0, sequence.num_tokens) for sequence in sequences])
    for sequence, row, count in zip(sequences, together, counts, strict=True):
        assert isinstance(row, Row)
        assert runner.execute([Scheduled(sequence, 0, sequence.num_tokens)]) == [row]
        assert len(row.prompt_logprobs) == (0 if count is None else sequence.num_tokens)
        assert {len(entry.token_ids) for entry in row.prompt_logprobs[1:]} <= {1 + (count or 0)}


@pytest.mark.parametrize("known", [1, 16, 17, 30, 33])
def test_what_is_known_is_not_said_again_when_the_prompt_is_computed_again(runner: ModelRunner, known: int) -> None:
    """C13: after a preemption, or where cached blocks hold the beginning."""
    prompt = prompt_of(33, seed=2)
    expected = prompt_logprobs(runner, make_sequence(prompt, [0, 1, 2], prompt_logprobs=1))
    again = make_sequence(prompt, [0, 1, 2], prompt_logprobs=1)
    again.num_prompt_logprobs = known
    assert prompt_logprobs(runner, again, [16, 32]) == expected[known:]
    cached = make_sequence(prompt, [0, 1, 2], prompt_logprobs=1)
    cached.num_prompt_logprobs = known
    start = (known - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert prompt_logprobs(runner, cached, start=start) == expected[known:]


def test_output_that_is_computed_again_is_no_prompt(runner: ModelRunner) -> None:
    prompt = prompt_of(20)
    expected = prompt_logprobs(runner, make_sequence(prompt, [0, 1], prompt_logprobs=2))
    resumed = make_sequence(prompt, [2, 3], prompt_logprobs=2)
    resumed.token_ids += [5, 6, 7]
    assert prompt_logprobs(runner, resumed, [19, 21]) == expected


def test_they_are_of_the_model_alone(runner: ModelRunner) -> None:
    """C12: no sampling parameter changes them."""
    prompt = prompt_of(20)
    shaped = make_sequence(
        prompt, [2, 3], prompt_logprobs=2, temperature=0.1, top_k=1, repetition_penalty=9.0, bad_word_ids=((1,),)
    )
    plain = make_sequence(prompt, [0, 1], prompt_logprobs=2)
    assert prompt_logprobs(runner, shaped) == prompt_logprobs(runner, plain)


def test_a_prompt_that_is_not_finite_fails_alone_and_only_where_that_is_asked(runner: ModelRunner) -> None:
    good = make_sequence(prompt_of(20), [0, 1], prompt_logprobs=1)
    (expected,) = runner.execute([Scheduled(good, 0, 20)])
    bad = make_sequence([1, BAD_TOKEN, 2, 3], [2], prompt_logprobs=1)
    unasked = make_sequence([1, BAD_TOKEN, 2, 3], [3])
    results = runner.execute([Scheduled(bad, 0, 3), Scheduled(good, 0, 20), Scheduled(unasked, 0, 3)])
    assert isinstance(results[0], Internal)
    assert results[1:] == [expected, Row()]
