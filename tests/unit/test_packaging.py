"""How the folders become one package: links, what a wheel holds, and no name that another package may have."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvrelay"
FOLDERS = {"cli", "connector", "decode_node", "engine", "kernels", "llm", "node", "prefill_node", "proto", "router"}


def test_each_folder_is_linked_into_the_package_by_a_relative_link() -> None:
    links = {entry.name: os.readlink(entry) for entry in PACKAGE.iterdir() if entry.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in FOLDERS}
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)


def test_the_package_itself_holds_no_code_but_its_version() -> None:
    files = {entry.name for entry in PACKAGE.iterdir() if not entry.is_symlink()}
    assert files - {"__pycache__"} == {"__init__.py", "py.typed"}


@pytest.mark.parametrize("folder", ["kernels", "proto"])
def test_folders_whose_names_others_use_are_no_packages_by_themselves(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_plain_names_never_find_our_folders(tmp_path: Path) -> None:
    program = f"""
import importlib.util, json
found = [spec for name in {sorted(FOLDERS)!r} if (spec := importlib.util.find_spec(name))]
print(json.dumps([place for spec in found for place in (*(spec.submodule_search_locations or ()), spec.origin)]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    places = [Path(place) for place in json.loads(done.stdout) if place]
    assert [place for place in places if place.is_relative_to(ROOT) and ".venv" not in place.parts] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that the build leaves nothing here."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    for name in ("src", *FOLDERS):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        "out",
    ]
    subprocess.run([*command, "."], cwd=source, capture_output=True, text=True, timeout=100, check=True)
    (built,) = (source / "out").glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_every_module_once_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" not in name]
    wanted = {
        f"kvrelay/{file.relative_to(ROOT)}"
        for folder in FOLDERS
        for pattern in ("*.py", "*.pyi", "*.proto", "*.cpp", "*.h", "*.html", "*.css", "*.js")
        for file in (ROOT / folder).rglob(pattern)
    }
    assert set(held) == wanted | {"kvrelay/__init__.py", "kvrelay/py.typed"}
    assert len(held) == len(set(held))


@pytest.mark.slow
def test_a_wheel_has_one_console_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parsed = configparser.ConfigParser()
        parsed.read_string(archive.read(entry_points).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert {section: dict(parsed[section]) for section in parsed.sections()} == {
        "console_scripts": {"kvrelay": "kvrelay.cli.main:main"}
    }
