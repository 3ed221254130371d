"""bench/proxy.py's pure part: what a fault does to a stream that comes in chunks of any size."""

import random

import pytest
from proxy import Break, Breaker, Fault

STREAM = bytes(range(40))


def through(broken, chunks):
    breaker, out = Breaker(broken), b""
    for chunk in chunks:
        data, end = breaker.feed(chunk)
        out += data
        if end is not None:
            return out, end, breaker
    return out, None, breaker


def in_chunks(rng):
    at, chunks = 0, []
    while at < len(STREAM):
        size = rng.randint(1, 9)
        chunks.append(STREAM[at : at + size])
        at += size
    return chunks


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("fault", "at", "size", "expected"),
    [
        (Fault.DROP, 7, 5, STREAM[:7] + STREAM[12:]),
        (Fault.CORRUPT, 7, 1, STREAM[:7] + bytes([7 ^ 0x10]) + STREAM[8:]),
        (Fault.STALL, 7, 5, STREAM[:7]),
        (Fault.DIE, 0, 1, b""),
        (Fault.DIE, 39, 1, STREAM[:39]),
    ],
)
def test_a_fault_strikes_its_bytes_whatever_the_chunks(seed, fault, at, size, expected):
    out, end, breaker = through(Break(fault, at, size), in_chunks(random.Random(seed)))
    assert out == expected
    assert end == (fault if fault in (Fault.STALL, Fault.DIE) else None)
    assert breaker.has_struck


@pytest.mark.parametrize("fault", [Fault.DOUBLE, Fault.REORDER])
@pytest.mark.parametrize("seed", range(30))
def test_doubled_and_reordered_stretches_keep_all_bytes(seed, fault):
    out, _, _ = through(Break(fault, 7, 5), in_chunks(random.Random(seed)))
    assert sorted(set(out)) == list(STREAM)
    assert len(out) == len(STREAM) + (5 if fault is Fault.DOUBLE else 0)
    assert out != STREAM
    assert out[:7] == STREAM[:7]


def test_a_whole_stretch_in_one_chunk_is_doubled_or_exchanged_in_place():
    assert through(Break(Fault.DOUBLE, 7, 5), [STREAM])[0] == STREAM[:12] + STREAM[7:]
    assert through(Break(Fault.REORDER, 7, 5), [STREAM])[0] == STREAM[:7] + STREAM[12:17] + STREAM[7:12] + STREAM[17:]


def test_a_place_beyond_the_stream_strikes_nothing():
    out, _, breaker = through(Break(Fault.DIE, 40), [STREAM])
    assert out == STREAM
    assert not breaker.has_struck
