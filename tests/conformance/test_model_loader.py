"""Whatever is wrong with a checkpoint's files is one ModelError that names it; every tensor is accounted for."""

import ctypes
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forward import CPU, Teacher
from support.tiny_model import make_tiny_model

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models import loader
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
    with pytest.raises(ModelError, match=r"model\.safetensors: .*truncated"):
        Teacher(folder)


@pytest.mark.parametrize("header", [b"\xff" * 8, (10**9).to_bytes(8, "little"), (16).to_bytes(8, "little") + b"{" * 16])
def test_a_corrupt_header_is_one_clear_error(folder: Path, header: bytes) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(header + content[len(header) :])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*header"):
        Teacher(folder)


def test_a_folder_without_weights_says_what_it_looked_for(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        Teacher(folder)


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    shard(folder)
    first = load_file(folder / "a.safetensors")
    name = next(iter(first))
    save_file(load_file(folder / "b.safetensors") | {name: first[name]}, folder / "b.safetensors")
    with pytest.raises(ModelError, match=r"is in a\.safetensors too"):
        Teacher(folder)


def test_weights_that_are_no_numbers_load(folder: Path) -> None:
    rewrite(folder, lambda w: w["model.norm.weight"].fill_(torch.nan))
    assert Checkpoint(folder, torch.float32, CPU).take("model.norm.weight", 48).isnan().all()


def test_a_write_into_a_tensor_does_not_reach_the_file(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    Checkpoint(folder, torch.float32, CPU).take("model.norm.weight", 48).zero_()
    assert (folder / FILE).read_bytes() == content


@pytest.mark.parametrize("padding", range(4))
def test_a_header_of_any_length_is_legal(folder: Path, padding: int) -> None:
    stored = load_file(folder / FILE)["model.norm.weight"].clone()
    content = (folder / FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * padding
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    found = Checkpoint(folder, torch.float32, CPU).take("model.norm.weight", 48)
    assert found.data_ptr() % found.itemsize == 0
    assert torch.equal(found, stored)


def test_tensors_outlive_their_checkpoint_and_the_other_tensors(folder: Path) -> None:
    stored = load_file(folder / FILE)
    checkpoint = Checkpoint(folder, torch.float32, CPU)
    kept = {name: checkpoint.take(name, *stored[name].shape) for name in stored}
    checkpoint.finish(lambda name: False)
    del checkpoint
    for name in [name for name in kept if "norm" not in name]:
        del kept[name]  # its pages are given back, and with them what shares a page
    for name, tensor in kept.items():
        assert torch.equal(tensor, stored[name])


# --- what a load takes and says


MATRICES, ROWS, COLUMNS = 24, 1024, 1408  # 66 MiB in bfloat16


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    matrix = torch.randn(ROWS, COLUMNS).bfloat16()
    save_file({f"{i}": matrix.clone() for i in range(MATRICES)}, folder / FILE)
    return folder


def peak_memory(work: Callable[[], object]) -> tuple[int, object]:
    """How far the process's resident memory rises at most, mapped pages too, and the work's result."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work left would hide what this takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = resident("VmRSS")
    result = work()
    return resident("VmHWM") - before, result


def resident(kind: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_takes_no_more_memory_than_the_weights_and_a_fifth(large: Path, dtype: torch.dtype) -> None:
    def load() -> list[torch.Tensor]:
        checkpoint = Checkpoint(large, dtype, CPU)
        tensors = [checkpoint.take(f"{i}", ROWS, COLUMNS) for i in range(MATRICES)]
        checkpoint.finish(lambda name: False)
        return tensors

    load()  # what torch takes once for itself
    rise, _ = peak_memory(load)
    weights = MATRICES * ROWS * COLUMNS * dtype.itemsize
    assert rise < 1.2 * weights


@pytest.mark.slow
def test_a_kernel_that_keeps_a_copy_of_its_own_has_the_only_one(large: Path) -> None:
    def load() -> list[torch.Tensor]:
        checkpoint = Checkpoint(large, torch.bfloat16, CPU)
        return [checkpoint.take(f"{i}", ROWS, COLUMNS).clone() for i in range(MATRICES)]

    load()
    rise, _ = peak_memory(load)
    assert rise < 1.2 * MATRICES * ROWS * COLUMNS * 2


def test_a_load_says_how_much_it_read_and_how_fast(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvrelay"):
        Teacher(folder)
    (record,) = (record for record in caplog.records if record.message == "weights_loaded")
    values = record.kvrelay_fields
    assert values["size_bytes"] == sum(tensor.nbytes for tensor in load_file(folder / FILE).values())
    assert values["rate_gb_s"] == pytest.approx(values["size_bytes"] / 1e9 / values["seconds"])


def test_a_bar_is_shown_on_a_terminal_alone_and_for_a_long_load_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_BAR_DELAY_S", 0)
    Teacher(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Teacher(folder)
    assert "loading weights:" in capsys.readouterr().err
    monkeypatch.setattr(loader, "_BAR_DELAY_S", 60)
    Teacher(folder)
    assert capsys.readouterr().err.strip() == ""


def test_a_disk_that_fails_is_an_error_and_no_crash(large: Path, tmp_path: Path) -> None:
    """The file becomes shorter under the map, as when another process writes it anew in place."""
    shutil.copy(large / FILE, tmp_path / FILE)
    checkpoint = Checkpoint(tmp_path, torch.float32, CPU)
    os.truncate(tmp_path / FILE, 4096)
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.take(f"{MATRICES - 1}", ROWS, COLUMNS)
