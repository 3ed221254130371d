"""A checkpoint's headers, read by hand: what is wrong with a file is one ModelError that names it."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.errors import ModelError
from kvrelay.engine.weight_files import read_header, read_tensors

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def packed(header: Any, data: bytes = bytes(32), length: int | None = None) -> bytes:
    """A safetensors file's bytes; `length`: what the file says of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(folder: Path, content: bytes, name: str = FILE) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def refused(folder: Path) -> str:
    """The one line with which a folder's weights are refused."""
    with pytest.raises(ModelError) as error:
        read_tensors(folder)
    assert error.value.message.isprintable()
    assert len(error.value.message) < 800
    return error.value.message


def test_tensors_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    file = write(tmp_path, packed({"b": B, "__metadata__": {"format": "pt"}, "a": A}))
    found = read_header(file)
    assert list(found) == ["a", "b"]
    assert (found["b"].dtype, found["b"].shape, found["b"].size_bytes) == ("BF16", (4,), 8)
    assert found["b"].offset == file.stat().st_size - 8
    assert found["a"].num_elements == 6


def test_a_scalar_an_empty_tensor_and_an_empty_file_of_tensors_are_legal(tmp_path: Path) -> None:
    scalar = {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}
    empty = {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [8, 8]}
    assert len(read_header(write(tmp_path, packed({"scalar": scalar, "empty": empty}, bytes(8))))) == 2
    assert read_header(write(tmp_path, packed({}, b""))) == {}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": {**A, "dtype": "F128"}}, "dtype 'F128' is not known"),
        ({"a": {**A, "dtype": ["F32"]}}, "dtype ['F32'] is not known"),
        ({"a": {**A, "shape": [2, -3]}}, "shape [2, -3]"),
        ({"a": {**A, "shape": [2.0, 3]}}, "shape [2.0, 3]"),
        ({"a": {**A, "shape": [True, 6]}}, "shape [True, 6]"),
        ({"a": {**A, "shape": "23"}}, "shape '23'"),
        ({"a": {**A, "shape": [2**62, 4]}}, "24 bytes are not what F32"),
        ({"a": {**A, "shape": [2**63 - 1] * 16}}, "24 bytes are not what F32"),
        ({"a": {**A, "shape": [1] * 17}}, "shape [1, 1,"),
        ({"a": {**A, "shape": [10**4000]}}, "shape ["),
        ({"a": {**A, "shape": [7]}}, "24 bytes are not what F32 [7] takes"),
        ({"a": {**A, "data_offsets": [0, 24, 32]}}, "expected a begin and an end"),
        ({"a": {**A, "data_offsets": [24, 0]}}, "expected a begin and an end"),
        ({"a": {**A, "data_offsets": [-24, 0]}}, "expected a begin and an end"),
        ({"a": {**A, "data_offsets": None}}, "expected a begin and an end"),
        ({"a": A, "b": {**B, "data_offsets": [16, 24]}}, "tensor b: data_offsets overlap"),
        ({"a": A, "b": A}, "data_offsets overlap"),
        ({"b": B}, "tensor b: data_offsets leave a gap"),
        ({"a": A}, "8 bytes stand behind the last tensor"),
        ({"a": A, "b": {**B, "shape": [2**40], "data_offsets": [24, 24 + 2**41]}}, "before its last tensor does"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, "expected dtype, shape and data_offsets"),
        ({"a": {**A, "more": 1}}, "expected dtype, shape and data_offsets"),
        ({"a": [A]}, "expected dtype, shape and data_offsets"),
        ({"a\n\x1b[2J": A}, "is no name of a tensor"),
        ({"a" * 513: A}, "is no name of a tensor"),
        ({"__metadata__": {"format": 1}}, "__metadata__"),
        ({"__metadata__": ["pt"]}, "__metadata__"),
        ([A], "not safetensors"),
        (b"{" * 100_000, "header: "),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "header: nested too deep"),
        (b'{"a": 1, "a": 2}', "header: 'a' stands twice"),
        (b'{"\xff": 1}', "header: 'utf-8' codec"),
        ('{"a": 1}'.encode("utf-16"), "not safetensors"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header: "),
        (b"", "not safetensors"),
    ],
)
def test_a_wrong_header_is_one_clear_line(tmp_path: Path, header: Any, says: str) -> None:
    write(tmp_path, packed(header))
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path / FILE}: ")
    assert says in message


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 10**9, 500])
def test_a_header_longer_than_its_file_takes_no_memory(tmp_path: Path, length: int) -> None:
    write(tmp_path, packed({"a": A}, length=length))
    tracemalloc.start()
    try:
        assert "too few for its header" in refused(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_longer_than_any_real_one_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, (2**30).to_bytes(8, "little") + b"{")
    os.truncate(file, 2**31)  # a hole: no bytes on the disk
    tracemalloc.start()
    try:
        assert "header of 1073741824 bytes" in refused(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_million_keys_are_refused(tmp_path: Path) -> None:
    write(tmp_path, packed(b"{" + b",".join(b'"%x":0' % i for i in range(1_000_000)) + b"}"))
    assert "tensor 0 = 0: expected dtype" in refused(tmp_path)
    write(tmp_path, packed(b"{" + b",".join([b'"a long name of a tensor":0'] * 1_000_000) + b"}"))
    assert "at most 16777216 are supported" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write(tmp_path, packed({"a": A, "b": B})[:keep])
    assert "truncated" in refused(tmp_path)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    for make in (lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(tmp_path / FILE)
        assert "not a file" in refused(tmp_path)
        (tmp_path / FILE).rmdir() if (tmp_path / FILE).is_dir() else (tmp_path / FILE).unlink()


def test_links_in_a_loop_and_into_nowhere_are_named(tmp_path: Path) -> None:
    for target in (FILE, "nowhere"):
        (tmp_path / FILE).symlink_to(target)
        assert f"{FILE}: cannot be read: " in refused(tmp_path)
        (tmp_path / FILE).unlink()


def shards(folder: Path, weight_map: Any) -> None:
    """Two files, `a` in one and `b` in the other, and an index of them."""
    write(folder, packed({"a": A}, bytes(24)), "1.safetensors")
    write(folder, packed({"b": {**B, "data_offsets": [0, 8]}}, bytes(8)), "2.safetensors")
    content = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
    write(folder, content, INDEX)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    assert {name: stored.file.name for name, stored in read_tensors(tmp_path).items()} == {
        "a": "1.safetensors",
        "b": "2.safetensors",
    }


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({}, "weight_map lists no tensors"),
        ([], "weight_map lists no tensors"),
        (None, "weight_map lists no tensors"),
        (b"[]", "expected a JSON object"),
        (b"{", "Expecting property name"),
        (b'{"\xff": 1}', "codec"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "'a' stands twice"),
        ({"a": 1}, "1 is not the name of a file"),
        ({"a": None}, "None is not the name of a file"),
        ({"a": ""}, "'' is not the name of a file"),
        ({"a": ".."}, "'..' is not the name of a file"),
        ({"a": "../1.safetensors"}, "is not the name of a file in this folder"),
        ({"a": "/etc/passwd"}, "is not the name of a file in this folder"),
        ({"a": "x/../1.safetensors"}, "is not the name of a file in this folder"),
        ({"a": "1.safetensors\0"}, "is not the name of a file in this folder"),
        ({"a": "3.safetensors"}, "3.safetensors: cannot be read: No such file"),
        ({"a": "2.safetensors"}, "2.safetensors: 'a' is missing, though"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, "1.safetensors: 'b' is missing, though"),
        ({"a": "1.safetensors", "c\n": "2.safetensors"}, r"2.safetensors: 'c\n' is missing, though"),
        ({"a": "x" * 300}, "cannot be read: File name too long"),
    ],
)
def test_a_wrong_index_is_one_clear_line(tmp_path: Path, weight_map: Any, says: str) -> None:
    shards(tmp_path, weight_map)
    assert says in refused(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    write(tmp_path, packed({"a": A}, bytes(24)), "2.safetensors")
    assert "2.safetensors: a is in 1.safetensors too" in refused(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "x.pth"])
def test_a_pickled_checkpoint_is_refused_by_name_and_not_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # opening it would hang
    message = refused(tmp_path)
    assert f"{name} is not read: a pickled checkpoint can run code" in message
    assert "safetensors" in message


def test_a_gguf_file_in_the_folder_is_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert "x.gguf is taken where the model names the file itself" in refused(tmp_path)
