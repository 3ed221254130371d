"""What a model's folder says of the model, read from its small files alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import AttentionShape, attention_shape, has_chat_template, read_model_info

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
        (2, 2, {"content": None}, (2,)),
        ([], [], None, ()),
        (-1, [2, 100], None, (2,)),  # what the model cannot produce ends nothing
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


@pytest.mark.parametrize("value", ["2", 2.0, True, {"id": 2}, [2, "3"], [[2]], [None]])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_an_eos_of_another_kind_is_named(tmp_path: Path, file: str, value: Any) -> None:
    """C09: to pass over it would be to answer without end."""
    base = CONFIG if file == "config" else {}
    path = folder(tmp_path, **{file: base | {"eos_token_id": value}})
    with pytest.raises(ModelError, match=rf"{file}\.json: eos_token_id = "):
        read_model_info(path)


@pytest.mark.parametrize("value", [7, ["<end>"], True, {"content": 7}, {"content": ["<end>"]}])
def test_a_special_token_of_another_kind_is_named(tmp_path: Path, value: Any) -> None:
    """C09."""
    path = folder(tmp_path, tokenizer_config={"eos_token": value}, tokenizer=ADDED)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: eos_token = "):
        read_model_info(path)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "many", "128", 1.5, True, [128], {"a": 1}, 2**31, 10**400, 1e400])
def test_a_size_that_is_none_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} = ") as error:
        read_model_info(folder(tmp_path, config=CONFIG | {key: value}))
    assert len(error.value.message) < 200


@pytest.mark.parametrize("value", ["Llama", {"a": 1}, [1], [None], [""], ["a b"], ["x\n\x1b[2J"], [["a"]]])
def test_architectures_that_are_no_names_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match="architectures = "):
        read_model_info(folder(tmp_path, config=CONFIG | {"architectures": value}))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"nonsense", b'{"\xff": 1}', b"[" * 100_000, b'{"a":' * 40 + b"1" + b"}" * 40]
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    path = folder(tmp_path)
    (path / file).write_bytes(content)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")) as error:
        read_model_info(path)
    assert error.value.message.isprintable()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"added_tokens": 1}',
        b'{"added_tokens": [1]}',
        b'{"added_tokens": ["x"]}',
        b'{"added_tokens": [{"content": "<end>"}]}',
        b'{"added_tokens": [{"content": ["<end>"], "id": 7}]}',
        b'{"added_tokens": [{"content": "<end>", "id": "7"}]}',
        b'{"added_tokens": [{"content": "\xff", "id": 7}]}',
        b'{"added_tokens": ' + b"[" * 100_000,
        '{"added_tokens": []'.encode("utf-16"),
    ],
)
def test_a_tokenizer_that_is_broken_where_it_is_read_is_named(tmp_path: Path, content: bytes) -> None:
    path = folder(tmp_path, tokenizer_config={"eos_token": "<end>"})
    (path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        read_model_info(path)


def test_a_file_that_is_a_pipe_or_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = folder(tmp_path)
    os.mkfifo(path / "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config\.json: not a file"):
        read_model_info(path)
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").touch()
    os.truncate(path / "generation_config.json", 2**40)
    with pytest.raises(ModelError, match=r"generation_config\.json: 1099511627776 bytes"):
        read_model_info(path)


def test_added_tokens_are_found_wherever_they_stand_and_whatever_tokens_are_called(tmp_path: Path) -> None:
    vocab = {"added_tokens": 5, '"added_tokens": [': 6}
    path = folder(tmp_path, tokenizer_config={"eos_token": "<end>"}, tokenizer={"model": {"vocab": vocab}} | ADDED)
    assert read_model_info(path).eos_token_ids == (7,)
    folder(path, tokenizer={"model": {"vocab": vocab}})
    assert read_model_info(path).eos_token_ids == ()


def test_a_language_model_among_other_parts_is_described_by_its_own_settings(tmp_path: Path) -> None:
    """Gemma 3 with images: what its config leaves out is what transformers has for its model type."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "vocab_size": None}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    info = read_model_info(folder(tmp_path, config=config | {"text_config": text, "vision_config": {"hidden_size": 9}}))
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids) == (262_208, 131_072, (1, 106))
    assert attention_shape(info.config) == AttentionShape(num_layers=34, num_heads=8, num_kv_heads=4, head_dim=256)
    for wrong in (1, [1], "text"):
        with pytest.raises(ModelError, match="text_config = "):
            read_model_info(folder(tmp_path, config=config | {"text_config": wrong}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_layer": 2, "n_head": 4, "n_embd": 48}, (2, 4, 4, 12)),  # GPT-2
        (
            {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60},
            (3, 6, 2, 10),
        ),
        ({"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 60, "head_dim": 7}, (3, 6, 6, 7)),
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "multi_query": True}, (2, 8, 1, 8)),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64, "num_kv_heads": 2}
            | {"multi_query": True, "new_decoder_architecture": True},  # Falcon's second
            (2, 8, 2, 8),
        ),
    ],
)
def test_how_much_attention_a_model_has_is_read_under_every_familys_names(
    config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    num_layers, num_heads, num_kv_heads, head_dim = expected
    assert attention_shape(config) == AttentionShape(
        num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def test_the_context_is_read_under_older_names(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024, "n_ctx": 512}
    assert read_model_info(folder(tmp_path, config=config)).max_model_len == 1024


def test_a_chat_template_stands_in_either_file(tmp_path: Path) -> None:
    assert not has_chat_template(folder(tmp_path, tokenizer_config={"chat_template": None}))
    assert has_chat_template(folder(tmp_path, tokenizer_config={"chat_template": "{{ messages }}"}))
    folder(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert has_chat_template(tmp_path)


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
