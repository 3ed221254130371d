"""What a model's folder says of it, read without torch: the router, the nodes and the CLI all ask this first.

A model folder is a Hugging Face one: config.json, tokenizer.json, *.safetensors, perhaps generation_config.json and
tokenizer_config.json. Weights are not read here, only sampled for the fingerprint.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.engine.errors import ModelError

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts of a model that the parts outside the model runner need."""

    path: Path
    name: str
    architecture: str
    vocab_size: int  # of the logits: every token id is below it
    max_model_len: int
    eos_token_ids: tuple[int, ...]  # union of config, generation_config and tokenizer
    bos_token_id: int | None
    fingerprint: str
    config: dict[str, Any]  # config.json as it stands


def read_model_info(path: Path, name: str = "") -> ModelInfo:
    """Read a model folder.

    Raises: ModelError, with the file and what is wrong with it.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: no such model folder")
    config = _read_json(path / "config.json", required=True)
    generation = _read_json(path / "generation_config.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    added_tokens = _added_tokens(_read_json(path / "tokenizer.json"))
    return ModelInfo(
        path=path,
        name=name or path.name,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        vocab_size=_positive(config, "vocab_size", path),
        max_model_len=_positive(config, "max_position_embeddings", path),
        eos_token_ids=_eos_token_ids(config, generation, tokenizer_config, added_tokens),
        bos_token_id=_token_id(tokenizer_config.get("bos_token"), added_tokens, config.get("bos_token_id")),
        fingerprint=_fingerprint(path, config),
        config=config,
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise ModelError(f"{path}: missing") from None
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def _positive(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path / 'config.json'}: {key} = {value!r}: expected a positive integer")
    return value


def _added_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or ()}


def _token_id(token: Any, added_tokens: dict[str, int], otherwise: Any = None) -> int | None:
    """The id of a special token as tokenizer_config names it: a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    found = added_tokens.get(content) if isinstance(content, str) else None
    if found is None and isinstance(otherwise, int):
        return otherwise
    return found


def _eos_token_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer_config: dict[str, Any], added_tokens: dict[str, int]
) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        values: Iterable[Any] = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in values if isinstance(token_id, int))
    from_tokenizer = _token_id(tokenizer_config.get("eos_token"), added_tokens)
    if from_tokenizer is not None:
        found.add(from_tokenizer)
    return tuple(sorted(found))


def _fingerprint(path: Path, config: dict[str, Any]) -> str:
    """Equal for equal models: the config, and every weight file's size, header and evenly spaced samples.

    Reading all of a large checkpoint would cost a start many seconds; two models that differ only between the samples
    (a few edited rows) are not told apart.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(_SAMPLES_PER_FILE):
                weights.seek(size * i // _SAMPLES_PER_FILE)
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
