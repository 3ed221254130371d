"""Compiles the kernels with this machine's compiler, once: the result is cached by source, flags, compiler and CPU.

Of several processes that come first at the same time one compiles, and the others wait for it.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCES = ("kernels.cpp", "attention.h", "batch.h", "linear.h", "rows.h", "team.h", "tile.h", "vec.h")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared", "-pthread")
_AMX_FLAG = "-DKVRELAY_AMX"
_TIMEOUT_S = 120


class NotBuiltError(Exception):
    """There are no compiled kernels here, and why."""


def load() -> ctypes.CDLL:
    """The compiled kernels.

    Raises: NotBuiltError.
    """
    flags = _FLAGS
    if "amx_bf16" in _cpu_flags():
        compiled = _load((*_FLAGS, _AMX_FLAG))
        if compiled.kvrelay_may_run():
            return compiled  # else the system keeps the tiles to itself
    return _load(flags)


def _load(flags: tuple[str, ...]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_compiled(flags)))
    except OSError as error:
        raise NotBuiltError(f"the compiled kernels cannot be loaded: {error}") from error


def _compiled(flags: tuple[str, ...]) -> Path:
    """The file, compiled if nobody has done so yet. Raises: NotBuiltError."""
    compiler = _find_compiler()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay" / "kernels"
    try:
        file = folder / f"{_key(compiler, flags)}.so"
        if file.exists():
            return file
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not file.exists():
                _compile(compiler, flags, file)
    except OSError as error:
        raise NotBuiltError(f"{folder}: {error}") from error
    return file


def _compile(compiler: str, flags: tuple[str, ...], file: Path) -> None:
    """Raises: NotBuiltError, OSError."""
    source = Path(__file__).with_name(_SOURCES[0])
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        try:
            done = subprocess.run(
                [compiler, *flags, str(source), "-o", str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise NotBuiltError(f"{compiler} did not end within {_TIMEOUT_S} s") from error
        if done.returncode:
            raise NotBuiltError(f"{compiler} failed: {_first_error(done.stderr)}")
        made.replace(file)


def _find_compiler() -> str:
    """Raises: NotBuiltError."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise NotBuiltError(f"no C++ compiler: looked for {' and '.join(names)}")
    return found


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Raises: OSError."""
    digest = hashlib.sha256()
    parts = [Path(__file__).with_name(name).read_bytes() for name in _SOURCES]
    binary = os.stat(compiler)
    parts += [" ".join(flags).encode(), f"{os.path.realpath(compiler)} {binary.st_size} {binary.st_mtime_ns}".encode()]
    parts.append(" ".join(_cpu_flags()).encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _cpu_flags() -> list[str]:
    """What this CPU can do; empty where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    names = ("flags", "Features", "model name")
    lines = [line for line in text.splitlines() if line.split(":")[0].strip() in names]
    return sorted({word for line in lines for word in line.split()})


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it says nothing")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
