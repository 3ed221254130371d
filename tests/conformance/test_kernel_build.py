"""Compiling the CPU kernels: once for all processes, whole or not at all, and never what another user may have written.

Compilers here are scripts where a real one would only take time.
"""

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.engine import log
from kvrelay.kernels.cpu import build
from kvrelay.kernels.cpu.build import NotBuiltError, load
from kvrelay.kernels.dispatch import get_kernels
from kvrelay.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
FAST = ("-O0",)  # compiles in a fraction of the time
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled kernels are kept in this test: an empty folder's part."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kvrelay" / "kernels"


@pytest.fixture
def restored_log() -> Iterator[None]:
    root = logging.getLogger("kvrelay")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.level, root.propagate = before


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared object as the compiler leaves it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("compiled")
    source, made = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text('extern "C" int kvrelay_may_run() { return 1; }')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(made)], check=True, timeout=100)
    return made


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Make a script the compiler; "$out" is the file to make. Returns a file with a line for each time it ran."""
    script, runs = tmp_path / "compiler", tmp_path / "runs"
    script.write_text(f'#!/bin/bash\necho >> {runs}\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return runs


def num_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def test_what_is_compiled_is_kept_for_its_owner_alone(
    tmp_path: Path, cache: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, f"cp {compiled} $out")
    for _ in range(3):
        assert load(("-DONE",)).kvrelay_may_run() == 1
    assert num_lines(runs) == 1
    assert load(("-DANOTHER",)).kvrelay_may_run() == 1
    assert num_lines(runs) == 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert sorted(file.suffix for file in cache.iterdir()) == [".so", ".so"]


def test_another_compiler_another_cpu_and_another_source_are_compiled_for_anew(
    tmp_path: Path, cache: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = compiler(tmp_path, monkeypatch, f"cp {compiled} $out")
    load(FAST)
    monkeypatch.setenv("CXX", os.environ["CXX"] + " --verbose")
    load(FAST)
    os.utime(tmp_path / "compiler", ns=(0, 1))
    load(FAST)
    monkeypatch.setattr(build, "cpu_flags", lambda: ["of", "another", "CPU"])
    load(FAST)
    monkeypatch.setattr(build, "_SOURCES", build._SOURCES[:-1])
    load(FAST)
    assert num_lines(runs) == len(list(cache.glob("*.so"))) == 5


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_compiled_again(
    tmp_path: Path, cache: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    runs = compiler(tmp_path, monkeypatch, f"cp {compiled} $out")
    load(FAST)
    (file,) = cache.glob("*.so")
    whole = file.read_bytes()
    replaced = tmp_path / "replaced"  # the loaded file stays as it is: another one takes its name
    replaced.write_bytes(whole[: int(share * len(whole))])
    replaced.replace(file)
    assert load(FAST).kvrelay_may_run() == 1
    assert (num_lines(runs), file.read_bytes()) == (2, whole)


PROGRAM = """
import sys
from kvrelay.kernels.cpu.build import load
sys.stdin.read()
assert load(("-O0",)).kvrelay_row_stride(0, 7) == 7
"""


@needs_compiler
@pytest.mark.slow
def test_of_many_processes_one_compiles_and_all_load(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("g++")
    script, runs = tmp_path / "compiler", tmp_path / "runs"
    script.write_text(f'#!/bin/bash\necho >> {runs}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE) for _ in range(6)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # all at once
    assert [process.wait(timeout=100) for process in processes] == [0] * 6
    assert num_lines(runs) == 1
    assert [file.suffix for file in cache.iterdir()] == [".so"]


BROKEN = {
    "fails": ("echo 'kernels.cpp:1: error: what is this' >&2; exit 1", "failed with 1: kernels.cpp:1: error: what is"),
    "crashes": ("kill -SEGV $$", "failed with -11: it says nothing"),
    "makes nothing": ("", "made nothing"),
    "makes nonsense": ("echo nonsense > $out", "cannot be loaded"),
    "speaks no language": (r"printf '\377\376 error' >&2; exit 1", "failed with 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_with_a_compiler_that_is_broken_the_reference_runs_and_one_line_says_why(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_log: None,
    case: str,
) -> None:
    body, reason = BROKEN[case]
    compiler(tmp_path, monkeypatch, body)
    assert_the_reference_runs(capsys, reason)
    assert not list(cache.iterdir())


def assert_the_reference_runs(capsys: pytest.CaptureFixture[str], reason: str) -> None:
    log.configure("test")
    assert isinstance(get_kernels(CPU), ReferenceKernels)
    (line,) = capsys.readouterr().err.splitlines()
    assert "WARNING test kernels_not_built reason=" in line
    assert reason in line


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_log: None
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    assert_the_reference_runs(capsys, "no C++ compiler: looked for no-such-compiler")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert_the_reference_runs(capsys, "no C++ compiler: looked for g++ and c++")


def test_the_reference_runs_without_a_word_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_log: None
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    log.configure("test")
    assert isinstance(get_kernels(CPU, "reference"), ReferenceKernels)
    assert capsys.readouterr().err == ""


def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_log: None
) -> None:
    started = tmp_path / "started"
    os.mkfifo(tmp_path / "never")
    # The driver's child holds standard error open, as cc1plus does.
    compiler(tmp_path, monkeypatch, f"cat {tmp_path}/never & echo $! > {started}; wait")
    monkeypatch.setattr(build, "_TIMEOUT_S", 1)
    assert_the_reference_runs(capsys, "did not end within 1 s")
    child = Path("/proc") / started.read_text().strip() / "stat"
    assert not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    assert not list(cache.iterdir())


@pytest.mark.parametrize("place", ["a file", "a folder that may not be written"])
def test_without_room_the_reference_runs_and_one_line_says_so(
    tmp_path: Path,
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_log: None,
    place: str,
) -> None:
    runs = compiler(tmp_path, monkeypatch, f"cp {compiled} $out")
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    if place == "a file":
        home.touch()
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        home.mkdir(mode=0o500)
    assert_the_reference_runs(capsys, "no room for compiled kernels")
    assert num_lines(runs) == 0


@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("fault", ["written by its group", "written by all", "another's", "a link"])
def test_code_that_another_user_may_have_written_is_not_loaded(
    tmp_path: Path, cache: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    runs = compiler(tmp_path, monkeypatch, f"cp {compiled} $out")
    load(FAST)
    (file,) = cache.glob("*.so")
    path = cache if what == "folder" else file
    if fault == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 12345, 12345)
    elif fault == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.chmod(0o720 if fault == "written by its group" else 0o702)
    monkeypatch.setattr(build.ctypes, "CDLL", None)  # would be a TypeError
    with pytest.raises(NotBuiltError, match="code is not loaded from there"):
        load(FAST)
    assert num_lines(runs) == 1


def test_without_a_home_there_are_no_compiled_kernels(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CXX", "true")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(NotBuiltError, match="home"):
        load()
