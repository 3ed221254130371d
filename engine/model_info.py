"""What a model's folder says of it, read without torch: the router, the nodes and the CLI all ask this first.

A model folder is a Hugging Face one: config.json, tokenizer.json, *.safetensors, perhaps generation_config.json and
tokenizer_config.json. Weights are not read here, only sampled for the fingerprint. A file may be anybody's: what is
wrong with it is a ModelError that names the file and the field.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import parse_object, read_file, read_object, shown

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_SIZE = 2**31 - 1  # of anything that is counted in a config; token ids travel as int32

# The names that families of models have for the same thing, the usual one first.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")

# What published configs leave out, since it is what transformers has for their model type.
_DEFAULTS = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
}


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
    gguf: Path | None = None  # the file that the folder was made of, or its first part


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How much attention a model has, by its config alone."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_model_info(path: Path, name: str = "", gguf: Path | None = None) -> ModelInfo:
    """Read a model folder, made of a GGUF file or not.

    Raises: ModelError, with the file and what is wrong with it.
    """
    if not path.is_dir():
        raise ModelError(f"{path}: no such model folder")
    config = read_object(path / "config.json", _MAX_CONFIG_BYTES)
    if config is None:
        raise ModelError(f"{path / 'config.json'}: missing")
    generation = read_object(path / "generation_config.json", _MAX_CONFIG_BYTES) or {}
    text = text_config(config)
    vocab_size = _size(text, "vocab_size")
    special = _SpecialTokens(path, vocab_size)
    eos_token_ids = {
        *special.ids("config.json", "eos_token_id", config.get("eos_token_id")),
        *special.ids("config.json", "eos_token_id", text.get("eos_token_id")),
        *special.ids("generation_config.json", "eos_token_id", generation.get("eos_token_id")),
        *special.named("eos_token"),
    }
    bos_token_ids = [*special.named("bos_token"), *special.ids("config.json", "bos_token_id", text.get("bos_token_id"))]
    return ModelInfo(
        path=path,
        name=name or path.name,
        architecture=_architecture(config),
        vocab_size=vocab_size,
        max_model_len=_size(text, *_CONTEXT),
        eos_token_ids=tuple(sorted(eos_token_ids)),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        fingerprint=_fingerprint(path, config),
        config=config,
        gguf=gguf,
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the language model: its own object's, where it has one among others, before those around it.

    Raises: ModelError.
    """
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise ModelError(f"config.json: text_config = {shown(nested)}: expected an object")
    found = config | {name: value for name, value in (nested or {}).items() if value is not None}
    kind = found.get("model_type")
    return (_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}) | found


def attention_shape(config: dict[str, Any]) -> AttentionShape:
    """What decides how much KV a token takes. Raises: ModelError."""
    text = text_config(config)
    num_heads = _size(text, *_HEADS)
    num_kv_heads = _size(text, *_KV_HEADS, default=num_heads)
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        num_kv_heads = 1
    head_dim = _size(text, "head_dim", default=0) or _size(text, *_HIDDEN) // num_heads
    return AttentionShape(
        num_layers=_size(text, *_LAYERS), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def has_chat_template(path: Path) -> bool:
    """Whether a model folder has a chat template, good or bad. Raises: ModelError."""
    tokenizer_config = read_object(path / "tokenizer_config.json", _MAX_CONFIG_BYTES) or {}
    return (path / "chat_template.jinja").is_file() or bool(tokenizer_config.get("chat_template"))


def sample_file(digest: "hashlib._Hash", file: Path) -> None:
    """Add a file's size, its beginning and evenly spaced samples to a digest. Raises: OSError."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode(errors="surrogateescape"))
    with file.open("rb") as content:
        for i in range(_SAMPLES_PER_FILE):
            content.seek(size * i // _SAMPLES_PER_FILE)
            digest.update(content.read(_SAMPLE_BYTES))


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures") or ["unknown"]
    first = named[0] if isinstance(named, list) else None
    if not isinstance(first, str) or not first.isidentifier():
        raise ModelError(f"config.json: architectures = {shown(named)}: expected a list of names")
    return first


def _size(text: dict[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these settings that is there. Raises: ModelError."""
    name = next((name for name in names if text.get(name) is not None), names[0])
    value = text.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
        raise ModelError(f"config.json: {name} = {shown(value)}: expected a positive integer")
    return value


class _SpecialTokens:
    """Finds token ids in whatever forms the files of a model folder give them."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._tokenizer_config = read_object(path / "tokenizer_config.json", _MAX_CONFIG_BYTES) or {}
        self._added: dict[str, int] | None = None

    def ids(self, file: str, field: str, value: Any) -> list[int]:
        """An id, a list of ids, or nothing. An id that the model cannot produce is none. Raises: ModelError."""
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            raise ModelError(f"{self._path / file}: {field} = {shown(value)}: expected a token id, or a list of them")
        return [one for one in values if 0 <= one < self._vocab_size]

    def named(self, field: str) -> list[int]:
        """What tokenizer_config.json names, as a string or an object with `content`. Raises: ModelError."""
        token = self._tokenizer_config.get(field)
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and not isinstance(content, str):
            file = self._path / "tokenizer_config.json"
            raise ModelError(f"{file}: {field} = {shown(token)}: expected a token's text")
        if content is None:
            return []
        if self._added is None:
            self._added = _added_tokens(self._path / "tokenizer.json")
        return self.ids("tokenizer.json", "added_tokens", self._added.get(content))


def _added_tokens(file: Path) -> dict[str, int]:
    """Text and id of the tokens that tokenizer.json lists apart. Raises: ModelError.

    The rest of that file is megabytes and needs a tenth of a second to a second, so it is passed over where that list
    can be found by its key: a quoted name before a colon and a bracket is a key wherever it stands.
    """
    content = read_file(file, _MAX_TOKENIZER_BYTES)
    if content is None:
        return {}
    listed: Any = None
    found = re.search(rb'"added_tokens"\s*:\s*(?=\[)', content)
    try:
        if found:
            listed, _ = json.JSONDecoder().raw_decode(content[found.end() :].decode())
        else:
            listed = parse_object(content, str(file)).get("added_tokens") or []
        return {token["content"]: token["id"] for token in listed}
    except RecursionError:
        raise ModelError(f"{file}: nested too deep") from None
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    except (TypeError, KeyError) as error:
        raise ModelError(f"{file}: added_tokens: expected objects with content and id") from error


def _fingerprint(path: Path, config: dict[str, Any]) -> str:
    """Equal for equal models: the config, and every weight file's size, header and evenly spaced samples.

    Reading all of a large checkpoint would cost a start many seconds; two models that differ only between the samples
    (a few edited rows) are not told apart. Raises: ModelError.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        for file in sorted(path.glob("*.safetensors")):
            if file.is_file():
                sample_file(digest, file)
    except OSError as error:
        raise ModelError(f"{error.filename or path}: {error.strerror}") from error
    return digest.hexdigest()[:32]
