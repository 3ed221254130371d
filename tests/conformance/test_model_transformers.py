"""The decoder against transformers, in float32 and bfloat16: logits at every position, and greedy tokens."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, VOCAB, WINDOW, make_model
from support.forward import CPU, Teacher, make_sequence
from support.tiny_model import make_tiny_model
from torch import Tensor

from kvrelay.engine.batch import build_batch
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.models.config import decoder_config
from kvrelay.engine.step import Row, Scheduled

LENGTH = 100
ORIGINAL = 32  # the context before a rope was scaled
CUTS = ([1], [16, 32, 33, 80], [17, 99], list(range(8, LENGTH, 8)))

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 3.5, 5.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "factor": 2.5}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": ("llama", LLAMA3 | {"original_max_position_embeddings": ORIGINAL}),
    "llama3 of part of each head": ("glm", LLAMA3 | {"original_max_position_embeddings": ORIGINAL}),
    "yarn": ("llama", YARN),
    "yarn with betas": ("llama", YARN | {"beta_fast": 3.0, "beta_slow": 0.2}),
    "yarn without truncation": ("llama", YARN | {"beta_fast": 3.0, "beta_slow": 0.2, "truncate": False}),
    "yarn with a magnitude": ("qwen3", YARN | {"attention_factor": 1.3}),
    "yarn with scales of magnitude": ("qwen3", YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}),
    "longrope": ("phi3", LONGROPE),
    "longrope with a factor": ("llama", LONGROPE | {"factor": 6.0}),
    "longrope with a magnitude": ("llama", LONGROPE | {"attention_factor": 1.2}),
}

Made = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A family's checkpoint, and the same model in transformers; each made once."""
    done: dict[str, tuple[Path, Any]] = {}

    def make(family: str) -> tuple[Path, Any]:
        if family not in done:
            folder = tmp_path_factory.mktemp("family")
            done[family] = folder, make_model(folder, family)
        return done[family]

    return make


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def reference(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_any_chunks(made: Made, family: str) -> None:
    """F05: prompts around the window and of three times its length, in chunks shorter and longer than it."""
    folder, model = made(family)
    token_ids = random_tokens(LENGTH)
    teacher = Teacher(folder)
    whole = teacher.logits(token_ids)
    assert_close(whole, reference(model, token_ids))
    for cuts in CUTS:
        assert torch.equal(teacher.logits(token_ids, cuts), whole)
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
        assert torch.equal(teacher.logits(token_ids[:length]), whole[:length])
    assert torch.equal(Teacher(folder, block_size=5).logits(token_ids, [3, 64]), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_change_in_company(made: Made, family: str) -> None:
    folder, _ = made(family)
    teacher = Teacher(folder)
    texts = [random_tokens(length, seed=length) for length in (37, 1, 50, 20)]
    alone = [teacher.logits(text) for text in texts]
    teacher.cache.pool.fill_(torch.nan)
    sequences = [make_sequence(text, range(5 * i, 5 * i + 4), f"{i}") for i, text in enumerate(texts)]
    with torch.inference_mode():
        for starts, ends in (((0, 0, 0, 0), (18, 1, 33, 19)), ((18, 0, 33, 19), (37, 1, 50, 20))):
            rows = [Scheduled(*item) for item in zip(sequences, starts, ends, strict=True)]
            batch = build_batch(rows, 16, teacher.kernels.row_multiple, CPU)
            logits = teacher.decoder.logits(teacher.decoder.forward(batch, teacher.cache.pool))
            expected = torch.cat([text[row.start : row.end] for text, row in zip(alone, rows, strict=True)])
            assert torch.equal(logits[: len(expected)], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, dtype=torch.bfloat16)
    token_ids = random_tokens(48)
    theirs = reference(model, token_ids)
    exact = reference(model.float(), token_ids)
    teacher = Teacher(tmp_path, dtype="bfloat16")
    ours = teacher.logits(token_ids)
    error, allowed = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.5 * allowed
    assert torch.equal(teacher.logits(token_ids, [1, 20]), ours)


@pytest.mark.parametrize("rope", ROPES)
def test_a_scaled_rope_is_that_of_transformers_beyond_the_original_context(rope: str, tmp_path: Path) -> None:
    """F02: every type of scaling, at positions up to three times the original context."""
    family, scaling = ROPES[rope]
    model = make_model(tmp_path, family, rope_theta=500.0, rope_parameters=dict(scaling), **original_of(family))
    token_ids = random_tokens(LENGTH)
    teacher = Teacher(tmp_path)
    whole = teacher.logits(token_ids)
    assert_close(whole, reference(model, token_ids))
    for cuts in CUTS:
        assert torch.equal(teacher.logits(token_ids, cuts), whole)
    assert torch.equal(teacher.logits(token_ids[: ORIGINAL - 1]), whole[: ORIGINAL - 1])


@pytest.mark.parametrize("rope", ROPES)
def test_old_names_of_a_rope_s_settings_mean_the_same(rope: str, tmp_path: Path) -> None:
    """F02: `type` and `su`, rope_theta and partial_rotary_factor beside rope_scaling."""
    family, scaling = ROPES[rope]
    make_model(tmp_path, family, rope_theta=500.0, rope_parameters=dict(scaling), **original_of(family))
    new = json.loads((tmp_path / "config.json").read_text())
    old_scaling = dict(new["rope_parameters"])
    old = {name: value for name, value in new.items() if name != "rope_parameters"} | {"rope_scaling": old_scaling}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in old_scaling:
            old[name] = old_scaling.pop(name)
    old_scaling["type"] = {"longrope": "su"}.get(kind := old_scaling.pop("rope_type"), kind)
    assert decoder_config(old) == decoder_config(new)


def original_of(family: str) -> dict[str, int]:
    """Phi-3 has the original context beside its rope's settings."""
    return {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}


def test_longrope_takes_the_short_factors_where_the_context_is_the_original_one(tmp_path: Path) -> None:
    scaling = LONGROPE | {"original_max_position_embeddings": 128}
    model = make_model(tmp_path, "llama", rope_parameters=scaling)
    token_ids = random_tokens(LENGTH)
    assert_close(Teacher(tmp_path).logits(token_ids), reference(model, token_ids))


def test_a_longrope_prompt_is_computed_alike_whatever_comes_after_it(tmp_path: Path) -> None:
    """F02: transformers takes other frequencies for a text that fits the original context than for its continuation;
    here keys that are cached at one length serve at any."""
    model = make_model(tmp_path, "llama", rope_parameters=LONGROPE | {"short_factor": LONGROPE["long_factor"]})
    short = random_tokens(ORIGINAL - 2)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = LONGROPE["short_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_close(Teacher(tmp_path).logits(short), reference(model, short))


@pytest.mark.parametrize("family", ["olmo3", "gemma3"])
def test_kinds_of_layers_have_ropes_of_their_own(family: str, tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 50.0}
    parameters = {"full_attention": YARN | {"rope_theta": 900.0}, "sliding_attention": plain}
    model = make_model(tmp_path, family, rope_parameters=parameters)
    token_ids = random_tokens(LENGTH)
    assert_close(Teacher(tmp_path).logits(token_ids, [40]), reference(model, token_ids))
    layers = decoder_config(json.loads((tmp_path / "config.json").read_text())).layers
    assert {layer.rope.theta for layer in layers if layer.rope is not None} == {900.0, 50.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_used_and_no_other_may_be_there(made: Made, family: str, tmp_path: Path) -> None:
    folder, _ = made(family)
    weights = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    strange = "model.layers.1.self_attn.strange.weight"
    biggest = max((name for name in weights if "layers.2" in name), key=lambda name: weights[name].numel())
    changed: dict[str, dict[str, Tensor]] = {
        strange: weights | {strange: torch.zeros(3)},
        biggest: {name: weight for name, weight in weights.items() if name != biggest},
        f"{biggest} has shape": weights | {biggest: weights[biggest][:, 1:].contiguous()},
    }
    for named, tensors in changed.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError) as error:
            Teacher(tmp_path)
        assert named in error.value.message


def test_the_text_part_of_a_model_with_images_is_found_under_either_name(made: Made, tmp_path: Path) -> None:
    folder, _ = made("gemma3 with images")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    moved = {f"model.{name.replace('language_model.model', 'language_model')}": weights[name] for name in weights}
    save_file(moved, tmp_path / "model.safetensors")
    token_ids = random_tokens(20)
    assert torch.equal(Teacher(tmp_path).logits(token_ids), Teacher(folder).logits(token_ids))


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, utils

    utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 90])
def test_greedy_tokens_are_those_of_transformers(prompt_length: int, tmp_path: Path) -> None:
    """Up to the first position whose two largest logits are too close to call."""
    folder = make_tiny_model(tmp_path / "model", seed=prompt_length)
    prompt = random_tokens(prompt_length, seed=prompt_length)
    runner = ModelRunner.load(read_model_info(folder), EngineConfig(num_blocks=16, threads=1))
    sequence = make_sequence(prompt, range(3, 11))
    while sequence.num_tokens < min(128, prompt_length + 40):
        (row,) = runner.execute([Scheduled(sequence, sequence.num_computed_tokens, sequence.num_tokens)])
        assert isinstance(row, Row)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.token_ids.append(row.sampled[0].token_id)
    runner.close()
    logits = reference(load_transformers(folder), sequence.token_ids)[prompt_length - 1 : -1]
    largest = logits.topk(2).values
    clear = int((largest[:, 0] - largest[:, 1] > 1e-3).cumprod(0).sum())
    assert clear >= 10
    assert sequence.token_ids[prompt_length:][:clear] == logits.argmax(-1).tolist()[:clear]
