"""--quantization: what becomes of a checkpoint's weights, and that a GGUF file's own are those of its conversion."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st
from support.families import make_model
from support.forward import CPU, Teacher
from support.gguf_models import finish, write_gguf
from support.oracle import random_prompt

from kvrelay.engine.config import Quantization
from kvrelay.engine.convert_gguf import convert
from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_codes import read_codes
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.models.quantise import GROUP, quantise
from kvrelay.engine.models.registry import load_model
from kvrelay.kernels.base import QuantisedWeight
from kvrelay.kernels.dispatch import get_kernels

# Types, and where their blocks have float16 numbers.
HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}  # whole blocks of every type


def random_blocks(kind: Kind, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows of blocks: every bit at random, but numbers of the size that weights have."""
    generator = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_rows * num_columns // block, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        values = generator.standard_normal(len(blocks)) * 2e-3
        blocks[:, at : at + 2] = values.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def write_tensor(path: Path, kind: Kind, rows: np.ndarray[Any, np.dtype[np.uint8]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", rows, raw_dtype=kind)
    finish(writer)
    return path


def unpacked(path: Path, dtype: torch.dtype) -> torch.Tensor:
    with Gguf(path) as source:
        read = read_codes(source.tensors["weight"])
    minimums = None if read.minimums is None else torch.from_numpy(read.minimums)
    codes, scales = torch.from_numpy(read.codes), torch.from_numpy(read.scales)
    return QuantisedWeight(codes, scales, minimums, read.bits, read.group, dtype).unpacked()


@pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
def test_codes_and_scales_of_a_file_are_its_values_to_the_bit(kind: Kind, tmp_path: Path) -> None:
    rows = random_blocks(kind, 37, 768)
    path = write_tensor(tmp_path / "x.gguf", kind, rows)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    for dtype in (torch.float32, torch.bfloat16):
        found = unpacked(path, dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), expected.to(dtype).view(bits))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_scale_that_is_no_number_is_an_error_by_name(kind: Kind, tmp_path: Path) -> None:
    rows = random_blocks(kind, 3, 256)
    at = HALVES[kind][-1]
    rows[1, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=r"x\.gguf: tensor weight: holds a value that is no number"):
        unpacked(write_tensor(tmp_path / "x.gguf", kind, rows), torch.float32)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(list(HALVES)), seed=st.integers(0, 2**32))
def test_any_bytes_are_read_or_refused(kind: Kind, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    size = (3, GGML_QUANT_SIZES[kind][1])
    rows = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    path = write_tensor(tmp_path_factory.mktemp("any") / "x.gguf", kind, rows)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    if expected.isfinite().all():
        assert torch.equal(unpacked(path, torch.float32), expected)
    else:
        with pytest.raises(ModelError, match="no number"):
            unpacked(path, torch.float32)


# --- whole models


def converted(folder: Path, family: str, kind: Kind, **options: Any) -> tuple[Path, Path]:
    """A random model of the family as a GGUF file, and what that is converted to."""
    path = write_gguf(folder / "m.gguf", make_model(folder / "original", family, **options), kind)
    (folder / "back").mkdir()
    convert(path, folder / "back", progress=False)
    return path, folder / "back"


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama", Kind.Q4_0, {"head_dim": 32}),  # rows of q and k come back in another order
        ("llama with biases", Kind.Q8_0, {"head_dim": 32}),  # one table for the embedding and the head
        ("granite", Kind.Q5_1, {"head_dim": None}),
        ("phi3", Kind.Q4_1, {}),  # several matrices in one
        ("gemma3", Kind.Q5_0, {"head_dim": 32}),
        ("qwen2", Kind.BF16, {"use_sliding_window": False, "sliding_window": None}),
    ],
    ids=str,
)
def test_a_file_run_as_it_is_gives_the_logits_of_its_conversion(
    family: str, kind: Kind, options: dict[str, Any], tmp_path: Path
) -> None:
    path, folder = converted(tmp_path, family, kind, **WIDE | options)
    prompt = random_prompt(70)
    found = Teacher(folder, dtype="bfloat16", quantization="gguf", gguf=path)
    assert_near(found.logits(prompt), Teacher(folder, dtype="bfloat16").logits(prompt))
    assert torch.equal(found.logits(prompt, cuts=(1, 17, 18, 50)), found.logits(prompt))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As near as roundings to bfloat16 leave two ways of computing a few layers of random weights."""
    assert float((found - expected).norm() / expected.norm()) < 0.04


def test_a_file_of_several_types_gives_the_logits_of_its_conversion(tmp_path: Path) -> None:
    """As they come: a gate and what it gates of different types, one of them not quantised."""
    model = make_model(tmp_path / "original", "llama", **WIDE, head_dim=32)
    kinds = {"up": [Kind.Q4_K, Kind.Q6_K, Kind.Q3_K, Kind.F16], "down": [Kind.Q6_K, Kind.Q2_K, Kind.Q5_K, Kind.Q8_0]}
    for layer in model.model.layers:
        del layer.mlp.up_proj, layer.mlp.down_proj

    def add(writer: gguf.GGUFWriter) -> None:
        for part, sizes in (("up", (512, 256)), ("down", (256, 512))):
            for i, kind in enumerate(kinds[part]):
                name = f"blk.{i}.ffn_{part}.weight"
                if kind == Kind.F16:
                    writer.add_tensor(name, np.random.default_rng(i).standard_normal(sizes).astype(np.float16))
                else:
                    writer.add_tensor(name, random_blocks(kind, *sizes, seed=i), raw_dtype=kind)

    path = write_gguf(tmp_path / "m.gguf", model, Kind.Q4_0, change=add)
    (tmp_path / "back").mkdir()
    convert(path, tmp_path / "back", progress=False)
    prompt = random_prompt(70)
    expected = Teacher(tmp_path / "back", dtype="bfloat16").logits(prompt)
    assert expected.isfinite().all()
    found = Teacher(tmp_path / "back", dtype="bfloat16", quantization="gguf", gguf=path)
    assert_near(found.logits(prompt), expected)
    assert torch.equal(found.logits(prompt, cuts=(1, 17, 18, 50)), found.logits(prompt))


def test_a_model_that_is_no_gguf_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="tiny: quantization = gguf takes a GGUF file's tensors, and this model is no"):
        load(tiny_model, "gguf")


def test_a_type_that_is_not_taken_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "original", "llama", **WIDE, num_hidden_layers=1, head_dim=32)
    del model.model.layers[0].mlp.up_proj
    up = np.zeros((512, GGML_QUANT_SIZES[Kind.IQ4_XS][1]), np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        Kind.Q4_0,
        change=lambda writer: writer.add_tensor("blk.0.ffn_up.weight", up, raw_dtype=Kind.IQ4_XS),
    )
    (tmp_path / "back").mkdir()
    convert(path, tmp_path / "back", progress=False)
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.0\.ffn_up\.weight: type IQ4_XS; .*takes Q4_0, .*Q6_K"):
        load(tmp_path / "back", "gguf", path)


def test_a_file_that_is_another_by_now_is_refused(tmp_path: Path) -> None:
    _, folder = converted(tmp_path, "llama", Kind.Q4_0, **WIDE, head_dim=32)
    (tmp_path / "other").mkdir()
    sizes = WIDE | {"intermediate_size": 256}
    other, _ = converted(tmp_path / "other", "llama", Kind.Q4_0, **sizes, head_dim=32)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.\w+\.weight has shape .* where it came from"):
        load(folder, "gguf", other)
    other.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"m\.gguf: .*more than is left"):
        load(folder, "gguf", other)
    other.unlink()
    with pytest.raises(ModelError, match="no such file"):
        load(folder, "gguf", other)


def test_what_transformers_runs_is_refused_by_name(tiny_model: Path) -> None:
    info = read_model_info(tiny_model)
    with pytest.raises(ModelError, match="tiny: quantization = int8: models that transformers runs have none"):
        load_model(info, torch.float32, get_kernels(CPU), CPU, "transformers", "int8")


def load(folder: Path, quantization: Quantization, path: Path | None = None) -> object:
    info = read_model_info(folder, gguf=path)
    return load_model(info, torch.bfloat16, get_kernels(CPU), CPU, "auto", quantization)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "glm", "phi3"])  # glm: interleaved rotary, so rows change places
def test_logits_are_those_of_a_checkpoint_of_the_rounded_weights(
    family: str, quantization: Quantization, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, family, tie_word_embeddings=True)
    prompt = random_prompt(50)
    found = Teacher(tmp_path, dtype=dtype, quantization=quantization).logits(prompt)
    plain = Teacher(tmp_path, dtype=dtype).logits(prompt)
    monkeypatch.setattr(
        "kvrelay.engine.models.quantised.quantise", lambda weight, bits: quantise(weight, bits).unpacked()
    )
    rounded = Teacher(tmp_path, dtype=dtype, quantization=quantization).logits(prompt)
    if dtype == "float32":
        assert torch.equal(rounded, found)
    else:
        assert_near(rounded, found)
    error = float((found - plain).norm() / plain.norm())
    assert 1e-4 < error < {"int8": 0.1, "int4": 0.5}[quantization]


# --- fewer bits


def relative_error(weight: torch.Tensor, bits: Any) -> float:
    made = quantise(weight, bits).unpacked().double()
    return float((made - weight.double()).norm() / weight.double().norm())


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("num_inputs", [32, 48, 77, 1])
def test_eight_bits_are_right_to_half_a_step(num_inputs: int, size: float) -> None:
    weight = torch.randn(50, num_inputs, generator=torch.Generator().manual_seed(3)) * size
    made = quantise(weight, 8)
    step = made.scales.float().repeat_interleave(GROUP, 1)[:, :num_inputs]
    assert ((made.unpacked() - weight).abs() <= 0.51 * step + 0.005 * weight.abs()).all()
    assert relative_error(weight, 8) < 0.01


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4, 1e30])
def test_four_bits_lose_less_than_the_range_cut_in_fifteen(size: float) -> None:
    weight = torch.randn(50, 320, generator=torch.Generator().manual_seed(3)) * size
    groups = weight.double().view(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    plain = float((((groups - low) / step).round() * step + low - groups).norm() / groups.norm())
    assert relative_error(weight, 4) < 0.96 * plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fits_into_the_codes_is_kept(bits: Any, dtype: torch.dtype) -> None:
    """Groups of zeros, of one value, of sixteen values at equal distances."""
    values = torch.stack([torch.zeros(32), torch.full((32,), 0.75), (torch.arange(32) % 16 - 8) / 8]).to(dtype)
    made = quantise(values, bits).unpacked()
    assert torch.equal(made[0], values[0])
    torch.testing.assert_close(made, values, rtol=0.004, atol=0.004)
    if bits == 4:
        assert torch.equal(made, values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_stays_seen_and_in_its_group(bits: Any, bad: float) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    weight[2, 40] = bad
    made = quantise(weight, bits).unpacked()
    wrong = ~made.isfinite()
    assert wrong[2, 32:64].all()
    assert wrong.sum() == 32


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(901, 77)
    for bits in (4, 8):
        whole = quantise(weight, bits).unpacked()  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr("kvrelay.engine.models.quantise._PIECE", 1000)
            assert torch.equal(quantise(weight, bits).unpacked(), whole)  # type: ignore[arg-type]
