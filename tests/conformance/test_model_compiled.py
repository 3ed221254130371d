"""The decoder as one program is the decoder step by step: every family, both dtypes, whatever came before."""

from pathlib import Path
from typing import cast

import pytest
import torch
from support.families import FAMILIES, VOCAB, make_model
from support.forward import CPU, Teacher, make_sequence
from support.kernel_sets import cpu_kernels

from kvrelay.engine.batch import ForwardBatch, build_batch
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.step import Scheduled

LENGTH = 90


@pytest.fixture(autouse=True)
def _compiled() -> None:
    cpu_kernels(1)  # or the test is skipped


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model(folder, "llama")
    return folder


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_what_the_reference_makes_of_it(family: str, dtype: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)
    token_ids = random_tokens(LENGTH)
    compiled, plain = Teacher(tmp_path, dtype=dtype), Teacher(tmp_path, dtype=dtype, kernels="reference")
    assert isinstance(compiled.decoder, CompiledDecoder)
    assert isinstance(plain.decoder, Decoder)
    found, expected = compiled.logits(token_ids), plain.logits(token_ids)
    if dtype == "float32":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.std())))
    else:  # both are as far from float32 as bfloat16 is, or nearer
        exact = Teacher(tmp_path, kernels="reference").logits(token_ids)
        error, allowed = ((logits - exact).square().mean().sqrt() for logits in (found, expected))
        assert error <= 1.2 * allowed
    assert torch.equal(plain.logits(token_ids, [1, 33]), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_has_the_same_bits_after_steps_of_more_and_fewer_rows(llama: Path, dtype: str) -> None:
    teacher, texts = Teacher(llama, dtype=dtype), {n: random_tokens(n, seed=n) for n in (1, 3, 16, 17, 33, 64, 90)}
    expected = {n: Teacher(llama, dtype=dtype).logits(text) for n, text in texts.items()}
    for n in (3, 1, 16, 17, 3, 90, 1, 64, 33, 17, 90, 3):
        assert torch.equal(teacher.logits(texts[n]), expected[n])


def batch_of(teacher: Teacher, token_ids: list[int]) -> ForwardBatch:
    sequence = make_sequence(token_ids, range(3, 3 + -(-len(token_ids) // 16)))
    return build_batch([Scheduled(sequence, 0, len(token_ids))], 16, teacher.kernels.row_multiple, CPU)


@torch.inference_mode()
def test_a_row_of_nan_leaves_no_trace_in_the_next_step(llama: Path) -> None:
    teacher, short = Teacher(llama), random_tokens(20)
    expected = teacher.logits(short)
    decoder = cast(CompiledDecoder, teacher.decoder)
    hidden = decoder.forward(batch_of(teacher, random_tokens(60, seed=1)), teacher.cache.pool)
    hidden.fill_(torch.nan)
    decoder.logits(hidden).fill_(torch.nan)
    teacher.cache.pool.fill_(torch.nan)
    assert torch.equal(teacher.logits(short), expected)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits
def test_a_step_gives_the_logits_of_the_rows_that_sample(family: str, dtype: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)
    teacher = Teacher(tmp_path, dtype=dtype)
    for lengths in ((5,), (1, 1, 1), (30, 1, 7), (2,) * 20, (1,)):  # more rows than there is room for at first
        sequences = [make_sequence(random_tokens(n, seed=n), (2 * i, 2 * i + 1)) for i, n in enumerate(lengths)]
        scheduled = [Scheduled(sequence, 0, sequence.num_tokens) for sequence in sequences]
        scheduled[0] = Scheduled(sequences[0], 0, max(1, lengths[0] - 1))  # of several tokens: does not sample
        batch = build_batch(scheduled, 16, 1, CPU)
        hidden = teacher.decoder.forward(batch, teacher.cache.pool).clone()
        logits = teacher.decoder.logits(hidden[batch.sample_rows])
        expected = logits.clone()
        logits.fill_(torch.nan)  # the step writes there again
        assert batch.num_sampled == len(expected) == len(lengths) - (lengths[0] > 1)
        states, logits = teacher.decoder.run(batch, teacher.cache.pool)
        assert torch.equal(logits, expected)
        assert torch.equal(states[: batch.num_rows], hidden)


@torch.inference_mode()
def test_hidden_states_survive_the_logits_of_some_of_them(llama: Path) -> None:
    """Prompt log-probabilities ask for logits again and again, after the sampler's."""
    teacher, text = Teacher(llama), random_tokens(50)
    expected = teacher.logits(text)
    hidden = teacher.decoder.forward(batch_of(teacher, text), teacher.cache.pool)
    before = hidden.clone()
    for rows in (slice(49, 50), slice(0, 40), slice(7, 8), slice(0, 50)):
        assert torch.equal(teacher.decoder.logits(hidden[rows]), expected[rows])
    assert torch.equal(hidden, before)
