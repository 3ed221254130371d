"""Compiles the kernels with this machine's compiler, once: the result is cached by source, flags, compiler and CPU.

    $XDG_CACHE_HOME/kvrelay/kernels/KEY.so     the compiled kernels, and behind them their SHA-256

Of several processes that come first at the same time one compiles, and the others wait for it. Code is loaded from
there only if nobody but this user can have written it, and only whole: a file that a full disk or a crash has cut off
would take the process with it.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HEADERS = "attention.h batch.h copies.h integer.h linear.h quantised.h rows.h sampling.h team.h tile.h vec.h"
_SOURCES = ("kernels.cpp", *_HEADERS.split())
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared", "-pthread")
_NATIVE = ("-march=native",)
_AMX = (*_NATIVE, "-DKVRELAY_AMX")
_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class NotBuiltError(Exception):
    """There are no compiled kernels here, and why."""


def load(flags: tuple[str, ...] = (), *, compiles: bool = True) -> ctypes.CDLL:
    """The compiled kernels. `flags`: what to compile for; none: whatever this CPU has. `compiles`: if nobody has yet.

    Raises: NotBuiltError.
    """
    native = (_AMX, _NATIVE) if "amx_bf16" in cpu_flags() else (_NATIVE,)
    for wanted in (flags,) if flags else native:
        compiled = _load(wanted, compiles)
        if compiled.kvrelay_may_run():
            return compiled
    raise NotBuiltError("this system does not let the process use what the CPU has")  # AMX's tiles, if asked for


def _load(flags: tuple[str, ...], compiles: bool) -> ctypes.CDLL:
    """Raises: NotBuiltError."""
    file = _compiled((*_FLAGS, *flags), compiles)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        file.unlink(missing_ok=True)  # another compiler, another try
        raise NotBuiltError(f"what was compiled cannot be loaded: {error}") from error


def _compiled(flags: tuple[str, ...], compiles: bool) -> Path:
    """The file, compiled if nobody has done so yet. Raises: NotBuiltError."""
    compiler = _find_compiler()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        file = folder / f"{_key(compiler, flags)}.so"
        if not _is_whole(file):
            if not compiles:
                raise NotBuiltError("nobody has compiled them yet")
            with _locked(folder):
                if not _is_whole(file):
                    _compile(compiler, flags, file)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise NotBuiltError(f"no room for compiled kernels: {error}") from error
    return file


def _compile(compiler: list[str], flags: tuple[str, ...], file: Path) -> None:
    """Raises: NotBuiltError, OSError."""
    source = Path(__file__).with_name(_SOURCES[0])
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        _run([*compiler, *flags, str(source), "-o", str(made)], folder)
        if not made.exists():
            raise NotBuiltError(f"{compiler[0]} made nothing")
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.chmod(0o700)
        made.replace(file)


def _run(command: list[str], folder: str) -> None:
    """Run a compiler, whose own temporary files go into the folder. Raises: NotBuiltError, OSError."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": folder, "LC_ALL": "C"},
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NotBuiltError(f"{command[0]} did not end within {_TIMEOUT_S} s") from error
        finally:
            if process.returncode is None:  # it is a driver: what it started must end too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise NotBuiltError(f"{command[0]} failed with {process.returncode}: {_first_error(said)}")


def _is_whole(file: Path) -> bool:
    """Whether a compiled file is there, and all of it. Raises: NotBuiltError for one that is not ours; OSError."""
    try:
        _check_owner(file)
    except FileNotFoundError:
        return False
    held = file.read_bytes()
    return hashlib.sha256(held[:-_DIGEST_BYTES]).digest() == held[-_DIGEST_BYTES:]


def _check_owner(path: Path) -> None:
    """Raises: NotBuiltError if others may write there, or have; OSError."""
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise NotBuiltError(f"{path} belongs to another user: code is not loaded from there")
    if stat.S_ISLNK(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotBuiltError(f"{path} may be written by others: code is not loaded from there (chmod go-w)")


def _find_compiler() -> list[str]:
    """Its path, and what $CXX says behind its name. Raises: NotBuiltError."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    names = wanted[:1] or ["g++", "c++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise NotBuiltError(f"no C++ compiler: looked for {' and '.join(names)}")
    return [found, *wanted[1:]]


def _key(compiler: list[str], flags: tuple[str, ...]) -> str:
    """Raises: OSError."""
    digest = hashlib.sha256()
    parts = [Path(__file__).with_name(name).read_bytes() for name in _SOURCES]
    binary = os.stat(compiler[0])
    parts.append(f"{os.path.realpath(compiler[0])} {binary.st_size} {binary.st_mtime_ns}".encode())
    parts.append(" ".join([*compiler[1:], *flags, "for", *cpu_flags()]).encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def cpu_flags() -> list[str]:
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


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
