"""GGUF files that are broken, hostile or of a kind that is not read: one clear error each, and no memory taken."""

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from support.gguf_models import finish

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Gguf

HUGE = 2**60
MEMORY_BYTES = 4 * 2**20


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """ModelError, within little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=problem) as caught:
            yield
        assert "\n" not in caught.value.message
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str = "t", dims: tuple[int, ...] = (4,), kind: int = Kind.F32, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (tensor(),),
    *,
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    data: bytes = bytes(16),
) -> bytes:
    counts = len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_(content: bytes, name: str = "m.gguf") -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write_


def test_what_the_gguf_package_writes_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("a.flag", True)
    writer.add_float32("a.eps", 1e-5)
    writer.add_float64("a.double", 0.1)
    writer.add_int64("a.negative", -(2**40))
    writer.add_array("a.words", ["ä", "", "\n"])
    writer.add_array("a.numbers", [1, 2, 3])
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("a", values)
    writer.add_tensor("b", values.astype(np.float16))
    finish(writer)
    with Gguf(tmp_path / "m.gguf") as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "a.flag": True,
            "a.eps": 1e-5,  # not the nearest float32's decimals
            "a.double": 0.1,
            "a.negative": -(2**40),
            "a.words": ["ä", "", "\n"],
            "a.numbers": [1, 2, 3],
        }
        for name in ("a", "b"):
            assert file.tensors[name].shape == (3, 4)
            assert np.array_equal(np.concatenate(list(file.tensors[name].rows(16))), values)
        assert [len(piece) for piece in file.tensors["a"].rows(16, multiple=2)] == [2, 1]


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"PK\x03\x04" + bytes(100), bytes(64)])
def test_another_file_is_no_gguf(content: bytes, write: Callable[[bytes], Path]) -> None:
    with refused("m.gguf: (not a GGUF file|(magic|version) at byte . are more|(magic|version) at byte)"):
        Gguf(write(content))


def test_every_truncation_is_one_clear_error(write: Callable[[bytes], Path]) -> None:
    content = file_of(
        (pair("general.name", 8, string("x" * 20)), pair("a", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3))),
        (tensor("a"), tensor("b", (4, 2), offset=32)),
        data=bytes(64),
    )
    with Gguf(write(content)) as whole:
        assert len(whole.tensors) == 2
    for length in range(len(content)):
        with pytest.raises(ModelError, match=r"m\.gguf: .*(left of the file|truncated or corrupt|not a GGUF)"):
            Gguf(write(content[:length]))


BROKEN: dict[str, tuple[bytes, str]] = {
    "version 1": (file_of(version=1), "GGUF version 1; supported: 2, 3"),
    "version 99": (file_of(version=99), "GGUF version 99"),
    "big-endian": (file_of(version=0x03000000), "big-endian"),
    "many pairs": (file_of(num_pairs=HUGE), f"{HUGE} pairs; at most 65536"),
    "more pairs than there are": (
        file_of((pair("k" * 24, 4, bytes(4)),), (), num_pairs=60_000, data=b""),
        "more than is left of the file",
    ),
    "many tensors": (file_of(num_tensors=HUGE), f"{HUGE} tensors"),
    "a key of 2^60 bytes": (file_of((struct.pack("<Q", HUGE),)), f"a key at byte 32: {HUGE} bytes are more"),
    "a string of 2^60 bytes": (file_of((pair("k", 8, struct.pack("<Q", HUGE)),)), f"k at byte .*: {HUGE} bytes are"),
    "an array of 2^60": (file_of((pair("k", 9, struct.pack("<IQ", 4, HUGE)),)), f"k: an array of {HUGE}; at most"),
    "an array of 2^60 strings": (file_of((pair("k", 9, struct.pack("<IQ", 8, HUGE)),)), f"an array of {HUGE}"),
    "a long array in a short file": (
        file_of((pair("k", 9, struct.pack("<IQ", 10, 2**22)),)),
        f"k at byte .*: {2**25} bytes are more than is left",
    ),
    "an array of arrays": (file_of((pair("k", 9, struct.pack("<IQ", 9, 1)),)), "k: values of type 9 are not known"),
    "a type that is none": (file_of((pair("k", 77, bytes(8)),)), "k: values of type 77 are not known"),
    "a key twice": (file_of((pair("k", 4, bytes(4)),) * 2), "k: there twice"),
    "a name that is no text": (file_of((string(b"\xff\xfe"),)), "a key: .* is not UTF-8"),
    "no alignment": (file_of((pair("general.alignment", 4, bytes(4)),)), "general.alignment = 0"),
    "an odd alignment": (file_of((pair("general.alignment", 4, struct.pack("<I", 48)),)), "alignment = 48"),
    "no dimensions": (file_of(tensors=(tensor(dims=()),)), "tensor t: 0 dimensions"),
    "many dimensions": (file_of(tensors=(tensor(dims=(1,) * 9),)), "tensor t: 9 dimensions"),
    "a billion dimensions": (
        file_of(tensors=(string("t") + struct.pack("<I", 2**30),)),
        f"tensor t: {2**30} dimensions",
    ),
    "a dimension of 0": (file_of(tensors=(tensor(dims=(4, 0)),)), "is not of whole F32 blocks"),
    "part of a block": (file_of(tensors=(tensor(dims=(33,), kind=Kind.Q8_0),)), "is not of whole Q8_0 blocks of 32"),
    "a row of 2^60": (file_of(tensors=(tensor(dims=(HUGE,)),)), f"tensor t: rows of {HUGE}; at most"),
    "2^62 elements": (file_of(tensors=(tensor(dims=(2**20, 2**42)),)), "truncated or corrupt"),
    "2^182 elements": (file_of(tensors=(tensor(dims=(4, HUGE, HUGE, HUGE)),)), "truncated or corrupt"),
    "a far offset": (file_of(tensors=(tensor(offset=HUGE),)), f"tensor t: ends at byte {HUGE + 64 + 16} of a file"),
    "a tensor twice": (file_of(tensors=(tensor(), tensor(offset=16)), data=bytes(32)), "tensor t: there twice"),
    "two tensors in one place": (file_of(tensors=(tensor("a"), tensor("b"))), "tensor b: lies over another"),
    "an unknown quantisation": (file_of(tensors=(tensor(kind=99),)), "tensor t: type 99 is not known"),
    "one of parts": (file_of((pair("split.count", 2, struct.pack("<H", 3)),)), "split.count = 3, and 1 files"),
    "tensors missing": (file_of((pair("split.tensors.count", 5, struct.pack("<i", 7)),)), "1 tensors in all"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_one_clear_error_and_takes_no_memory(name: str, write: Callable[[bytes], Path]) -> None:
    content, problem = BROKEN[name]
    with refused(f"^m.gguf: .*{problem}"):
        Gguf(write(content))


@pytest.mark.parametrize("kind", [Kind.Q8_1, Kind.Q8_K, Kind.I8, Kind.I32, Kind.F64], ids=lambda kind: kind.name)
def test_a_type_that_is_no_weight_is_refused_by_name(kind: Kind, write: Callable[[bytes], Path]) -> None:
    with refused(f"tensor t: type {kind.name} is not supported"):
        Gguf(write(file_of(tensors=(tensor(dims=(256,), kind=kind),), data=bytes(4096))))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_refused_by_the_tensors_name(
    value: float, write: Callable[[bytes], Path]
) -> None:
    data = np.array([1, 2, value, 4], np.float32).tobytes()
    with Gguf(write(file_of(data=data))) as file, pytest.raises(ModelError, match="tensor t: holds a value that is no"):
        list(file.tensors["t"].rows(2**20))


def test_what_is_no_file_is_no_model(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelError, match="no such file"):
            Gguf(path)


def split(number: int, count: int, name: str) -> bytes:
    pairs = pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))
    return file_of(pairs, (tensor(name),))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(split(0, 2, "a"))
    second.write_bytes(split(1, 2, "b"))
    for path in (first, second):  # either stands for both
        with Gguf(path) as file:
            assert list(file.tensors) == ["a", "b"]
    for wrong, problem in (
        (split(0, 2, "b"), "not part 1 of this model"),
        (split(1, 3, "b"), "not part 1 of this model"),
        (split(1, 2, "a"), "tensor a: there twice"),
        (file_of(), "not part 1 of this model"),
    ):
        second.write_bytes(wrong)
        with pytest.raises(ModelError, match=f"^m-00002-of-00002.gguf: .*{problem}"):
            Gguf(first)


@pytest.mark.parametrize(
    "names",
    [
        ["m.gguf.part00", "m.gguf.part01", "m.gguf.part02"],
        ["m.gguf-part1", "m.gguf-part2", "m.gguf-part3"],
        ["m.gguf.part1of3", "m.gguf.part2of3", "m.gguf.part3of3"],
        [f"m.gguf.part{i}" for i in range(11)],  # 10 comes after 9
    ],
)
def test_slices_are_read_as_the_file_that_was_cut(names: list[str], tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    content = file_of(tensors=(tensor(dims=(4, 2)),), data=values.tobytes())
    step = -(-len(content) // len(names))
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(content[i * step : (i + 1) * step])
    for name in (names[0], names[-1]):
        with Gguf(tmp_path / name) as file:
            assert np.array_equal(np.concatenate(list(file.tensors["t"].rows(16))).ravel(), values)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=r"m\.gguf: \d+ slices; expected all"):
        Gguf(tmp_path / names[0])
