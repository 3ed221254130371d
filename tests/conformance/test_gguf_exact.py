"""GGUF files against the checkpoints that they were written from: every tensor, every logit, every greedy token."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from support.families import VOCAB, WINDOW, make_model
from support.forward import Teacher
from support.gguf_models import finish, write_gguf

from kvrelay.engine import gguf_safetensors
from kvrelay.engine.convert_gguf import convert
from kvrelay.engine.errors import ModelError

# Context that is long beside the original one, and thetas at which all three parts of llama3's formula count.
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "long_factor": [1.5, 2, 3, 4, 5, 6.5], "short_factor": [1, 1.25, 1.5, 2, 2.5, 3]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_NO_WINDOW = {"sliding_window": None}
_ALL_ATTEND = {"use_sliding_window": False} | _NO_WINDOW
_SCALAR = {"query_pre_attn_scalar": 12}  # the head's size: what a file without it means

# Name of the case -> (family, what a GGUF file can say of it)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", _SCALAR),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": 6} | _SCALAR),
    "gemma3 scaled": (
        "gemma3 capped and scaled",
        {"num_hidden_layers": 7, "sliding_window_pattern": 6, "layer_types": None} | _SCALAR,
    ),
    "gemma3 without windows": ("gemma3", {"layer_types": ["full_attention"] * 4} | _SCALAR),
    "granite": ("granite", {"head_dim": None, "hidden_size": 72}),
    "llama": ("llama", {}),
    "llama with biases": ("llama with biases", {}),
    "llama3": (
        "llama",
        {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}, "rope_theta": 500_000.0},
    ),
    "llama3 for a shorter context": (
        "llama",
        {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 32}, "rope_theta": 100.0},
    ),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", _NO_WINDOW),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3 yarn": ("olmo3", {"rope_scaling": _YARN}),
    "phi3": ("phi3", {}),
    "phi3 without a window": ("phi3", _NO_WINDOW),
    "phi3 long": ("phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 32}),
    "qwen2": ("qwen2", _ALL_ATTEND),
    "qwen2 yarn": ("qwen2", _ALL_ATTEND | {"rope_scaling": _YARN}),
    "qwen3": ("qwen3", {}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}),
    "starcoder2": ("starcoder2", _NO_WINDOW),
}


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_logits(model: Any, token_ids: Seq[int]) -> torch.Tensor:
    """[T, V]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def converted(path: Path, model: Any, kind: Kind = Kind.F32, **options: Any) -> Path:
    """`model` written as GGUF and converted back: the folder."""
    folder = path / f"back {kind.name}"
    folder.mkdir()
    convert(write_gguf(path / "model.gguf", model, kind, **options), folder, progress=False)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_comes_back_as_it_was(case: str, tmp_path: Path) -> None:
    """F03, F02: every tensor has the same bits, and transformers and our decoder compute the same with it."""
    from transformers import AutoModelForCausalLM

    family, settings = CASES[case]
    model = make_model(tmp_path / "original", family, **settings)
    folder = converted(tmp_path, model)
    expected, found = (load_file(path / "model.safetensors") for path in (tmp_path / "original", folder))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = (tensor + 1) - 1  # 1 was added in float32, and the last bits went
        assert torch.equal(found[name], tensor), name
    back = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    token_ids = random_tokens(100)
    logits = transformers_logits(model, token_ids)
    torch.testing.assert_close(transformers_logits(back, token_ids), logits, rtol=0, atol=1e-3)
    torch.testing.assert_close(Teacher(folder).logits(token_ids), logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("case", ["llama", "llama with biases", "llama3", "qwen2", "gemma3", "phi3", "phi3 long"])
def test_our_decoder_computes_an_f16_file_as_transformers_the_original(case: str, tmp_path: Path) -> None:
    """F03, F05: logits within 1e-2 and 32 equal greedy tokens, at prompts shorter and longer than the window."""
    family, settings = CASES[case]
    model = make_model(tmp_path / "original", family, **settings)
    for parameter in model.parameters():  # as checkpoints in half precision are, so that nothing is lost in F16
        parameter.data.copy_(parameter.data.half())
    teacher = Teacher(converted(tmp_path, model, Kind.F16))
    model.generation_config.eos_token_id = None
    for length in (3 * WINDOW,) if case == "phi3 long" else (WINDOW - 3, 3 * WINDOW):
        prompt = torch.tensor([random_tokens(length, seed=length)])
        answer = model.generate(prompt, do_sample=False, max_new_tokens=32, pad_token_id=0)[0]
        logits, expected = teacher.logits(answer.tolist()), transformers_logits(model, answer.tolist())
        assert (logits - expected).abs().max() < 1e-2
        assert torch.equal(logits[length - 1 : -1].argmax(-1), answer[length:])


def test_a_file_of_halves_or_brain_floats_keeps_its_bits(tmp_path: Path) -> None:
    model = make_model(tmp_path / "original", "llama")
    for kind, dtype in ((Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)):
        found = load_file(converted(tmp_path, model, kind) / "model.safetensors")
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[name], tensor.to(dtype) if tensor.ndim == 2 else tensor)


def _random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Any bytes whose 16-bit floats are small numbers, wherever a type has its scales."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(kind).integers(0, 0x3C, (rows, columns // block * block_bytes), np.uint8)


_NOT_SUPPORTED = (Kind.Q8_1, Kind.Q8_K, Kind.Q1_0, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.F64)
_QUANTISED = [kind for kind in Kind if kind not in (*_NOT_SUPPORTED, Kind.F32, Kind.F16, Kind.BF16)]


@pytest.mark.parametrize("kind", _QUANTISED, ids=lambda kind: kind.name)
def test_a_quantised_tensor_is_what_the_gguf_package_makes_of_it(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, after rounding to bfloat16; in one piece or in many."""
    model = make_model(tmp_path / "original", "qwen2", **CASES["qwen2"][1], hidden_size=256, num_hidden_layers=1)
    up = _random_blocks(kind, 88, 256)
    name = "model.layers.0.mlp.up_proj.weight"
    del model.model.layers[0].mlp.up_proj
    for piece_bytes in (gguf_safetensors.PIECE_BYTES, 3000):
        monkeypatch.setattr(gguf_safetensors, "PIECE_BYTES", piece_bytes)
        work = tmp_path / str(piece_bytes)
        work.mkdir()
        folder = converted(
            work, model, Kind.BF16, change=lambda w: w.add_tensor("blk.0.ffn_up.weight", up, raw_dtype=kind)
        )
        expected = torch.from_numpy(gguf.quants.dequantize(up, kind)).bfloat16()
        assert torch.equal(load_file(folder / "model.safetensors")[name], expected)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_quantised_model_comes_back_unpermuted(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move as whole rows of blocks: each is what its own quantisation makes of it, a few rows at a time."""
    monkeypatch.setattr(gguf_safetensors, "PIECE_BYTES", 20 * 64 * 4)  # heads have 12
    model = make_model(tmp_path / "original", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=8)
    found = load_file(converted(tmp_path, model, kind) / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            assert torch.equal(found[name], torch.from_numpy(rounded).bfloat16()), name


def test_parts_and_slices_of_a_file_are_that_file(tmp_path: Path) -> None:
    model = make_model(tmp_path / "original", "llama")
    expected = load_file(converted(tmp_path, model) / "model.safetensors")
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "model.gguf", model, split_max_tensors=9)
    first, *others = sorted((tmp_path / "parts").iterdir())
    assert first.name == "model-00001-of-00005.gguf"
    slices = tmp_path / "slices"
    slices.mkdir()
    content = (tmp_path / "model.gguf").read_bytes()
    for i in range(4):
        (slices / f"m.gguf.part{i:02d}").write_bytes(content[i * 31_000 : (i + 1) * 31_000 if i < 3 else None])
    for j, path in enumerate((first, others[2], slices / "m.gguf.part00")):
        folder = tmp_path / f"out {j}"
        folder.mkdir()
        convert(path, folder, progress=False)
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    others[-1].unlink()
    (slices / "m.gguf.part02").unlink()
    for path, problem in ((first, "00005-of-00005.gguf: no such file"), (slices / "m.gguf.part00", "3 slices")):
        with pytest.raises(ModelError, match=problem):
            convert(path, tmp_path, progress=False)


def test_a_large_model_becomes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model(tmp_path / "original", "qwen3")
    monkeypatch.setattr(gguf_safetensors, "MAX_FILE_BYTES", 100_000)
    folder = converted(tmp_path, model)
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((folder / file).stat().st_size < 110_000 for file in files)
    back = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    token_ids = random_tokens(20)
    assert torch.equal(transformers_logits(back, token_ids), transformers_logits(model, token_ids))
    torch.testing.assert_close(
        Teacher(folder).logits(token_ids), transformers_logits(model, token_ids), rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("name", ["blk.0.attn_k_norm.weight", "blk.4.attn_q.weight", "cls.weight", "blk.0.odd.weight"])
def test_a_tensor_without_a_use_is_an_error_by_name(name: str, tmp_path: Path) -> None:
    """F03."""
    model = make_model(tmp_path / "original", "llama")
    extra = np.zeros((72, 48), np.float32)
    with pytest.raises(ModelError, match=f"has no use for: {name}"):
        converted(tmp_path, model, change=lambda writer: writer.add_tensor(name, extra))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("llama.expert_count", 8, "not supported"),
        ("llama.attention.sliding_window", 4096, "not supported"),
        ("llama.rope.scaling.type", "ntk", "not supported"),
        ("llama.attention.causal", False, "only True is supported"),
        ("general.type", "adapter", "not a model"),
    ],
)
def test_a_setting_that_is_not_known_is_refused_by_name(
    key: str, value: int | bool | str, problem: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "original", "llama")

    def add(writer: gguf.GGUFWriter) -> None:
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(key, value, kind[type(value)])

    with pytest.raises(ModelError, match=f"{key} = {value!r}: .*{problem}"):
        converted(tmp_path, model, change=add)


def test_an_architecture_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"general.architecture = 'mamba' is not supported; supported: arcee, gemma,"):
        convert(tmp_path / "m.gguf", tmp_path, progress=False)


def test_more_layers_than_tensors_are_refused_before_anything_is_made_of_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_block_count(2**31)
    writer.add_embedding_length(2)
    writer.add_head_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match=r"gemma3.block_count = 2147483648: the file has 1 tensors"):
        convert(tmp_path / "m.gguf", tmp_path, progress=False)
