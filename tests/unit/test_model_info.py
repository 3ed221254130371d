"""What a model's folder says of the model, read from its small files alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import read_model_info

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def folder(path: Path, **files: Any) -> Path:
    """A model's folder with config.json and whatever else is given, by name without `.json`."""
    for name, content in {"config": CONFIG, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


ADDED = {"added_tokens": [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<s>"}]}


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (None, None, None, ()),
        (2, None, None, (2,)),
        ([2, 3], None, None, (2, 3)),
        (None, 4, None, (4,)),
        (2, [4, 5], None, (2, 4, 5)),
        (None, None, "<end>", (7,)),
        (2, 2, {"content": "<end>"}, (2, 7)),
        ([3, 2], [2, 5], "<end>", (2, 3, 5, 7)),
        (2, None, "<unknown>", (2,)),
    ],
)
def test_eos_is_what_any_of_the_three_files_calls_so(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    """C08, C09."""
    path = folder(
        tmp_path,
        config=CONFIG | {"eos_token_id": config},
        generation_config={"eos_token_id": generation},
        tokenizer_config={"eos_token": tokenizer},
        tokenizer=ADDED,
    )
    assert read_model_info(path).eos_token_ids == expected


def test_bos_is_the_tokenizer_s_before_the_config_s(tmp_path: Path) -> None:
    path = folder(tmp_path, config=CONFIG | {"bos_token_id": 1}, tokenizer=ADDED)
    assert read_model_info(path).bos_token_id == 1
    folder(tmp_path, tokenizer_config={"bos_token": "<s>"}, tokenizer=ADDED)
    assert read_model_info(path).bos_token_id == 8


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", 1.5])
def test_a_size_that_is_none_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key):
        read_model_info(folder(tmp_path, config=CONFIG | {key: value}))


@pytest.mark.parametrize("content", ["", "{", "[1]", "nonsense"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    path = folder(tmp_path)
    (path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_info(path)


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(bytes(100_000))
    before = read_model_info(path).fingerprint
    assert read_model_info(path).fingerprint == before
    (path / "model.safetensors").write_bytes(bytes(50_000) + b"\1" + bytes(49_999))
    changed = read_model_info(path).fingerprint
    (path / "model.safetensors").write_bytes(bytes(100_001))
    longer = read_model_info(path).fingerprint
    folder(tmp_path, config=CONFIG | {"rope_theta": 5})
    assert len({before, changed, longer, read_model_info(path).fingerprint}) == 4
