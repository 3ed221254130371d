"""Whatever is wrong with a checkpoint's files is one ModelError that names it; every tensor is accounted for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forward import CPU, Teacher
from support.tiny_model import make_tiny_model

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.loader import Checkpoint

Weights = dict[str, torch.Tensor]
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", num_hidden_layers=2)


def shard(folder: Path) -> dict[str, str]:
    """Split the checkpoint in two files and an index; returns the index's map."""
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def rewrite(folder: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE)


def test_a_sharded_checkpoint_is_the_single_one(folder: Path) -> None:
    expected = Teacher(folder).logits(range(20))
    shard(folder)
    assert torch.equal(Teacher(folder).logits(range(20)), expected)


def test_a_tensor_in_the_right_dtype_is_mapped_and_any_other_is_cast(folder: Path) -> None:
    stored = load_file(folder / FILE)["model.norm.weight"]
    before = Checkpoint(folder, torch.float32, CPU).take("model.norm.weight", 48)
    assert torch.equal(before, stored)
    cast = Checkpoint(folder, torch.bfloat16, CPU).take("model.norm.weight", 48)
    assert torch.equal(cast, stored.bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(72)}), "self_attn.q_proj.bias"),
        (lambda w: w.update({"model.layers.2.input_layernorm.weight": torch.zeros(48)}), "layers.2.input_layernorm"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(49)}), "shape [49]; config.json asks for [48]"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "is I8"),
    ],
)
def test_a_tensor_too_few_too_many_or_of_another_kind_is_named(
    folder: Path, change: Callable[[Weights], object], named: str
) -> None:
    """F03: a bias that is dropped loads fine and answers garbage."""
    rewrite(folder, change)
    with pytest.raises(ModelError) as error:
        Teacher(folder)
    assert named in error.value.message


def test_rotary_frequencies_and_a_copy_of_tied_embeddings_may_remain(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    expected = Teacher(folder).logits(range(20))
    rewrite(
        folder,
        lambda w: w.update(
            {
                "lm_head.weight": w["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
            }
        ),
    )
    assert torch.equal(Teacher(folder).logits(range(20)), expected)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_one_clear_error(folder: Path, keep: int) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        Teacher(folder)


@pytest.mark.parametrize("header", [b"\xff" * 8, (10**9).to_bytes(8, "little"), (16).to_bytes(8, "little") + b"{" * 16])
def test_a_corrupt_header_is_one_clear_error(folder: Path, header: bytes) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(header + content[len(header) :])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        Teacher(folder)


def test_a_folder_without_weights_says_what_it_looked_for(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        Teacher(folder)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (b"{", "not an index"),
        (b"[]", "not an index"),
        (b'{"weight_map": {}}', "lists no tensors"),
        (b'{"weight_map": {"x": "../other/model.safetensors"}}', "not the name of a file"),
        (b'{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors: cannot be read"),
        (b'{"weight_map": {"x": "a.safetensors"}}', "a.safetensors: x is missing"),
    ],
)
def test_a_wrong_index_is_one_clear_error(folder: Path, index: bytes, named: str) -> None:
    shard(folder)
    (folder / INDEX).write_bytes(index)
    with pytest.raises(ModelError) as error:
        Teacher(folder)
    assert named in error.value.message


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    shard(folder)
    first = load_file(folder / "a.safetensors")
    name = next(iter(first))
    save_file(load_file(folder / "b.safetensors") | {name: first[name]}, folder / "b.safetensors")
    with pytest.raises(ModelError, match="is in another file too"):
        Teacher(folder)
