"""Measures hand-offs between two processes of this host: P here, D in a child, pools and connectors real, no model.

    python bench/transfer.py [--transport shm] [--loaded] [--block-kib 360] ...

Three figures. Throughput: bytes over time from the first push to COMMIT's being due, many scattered blocks, beside a
plain loop of memmove over the same blocks in this process. Control: a transfer of nothing, from `commit` to the moment
at which D's engine would be woken. Exposed: a prompt pushed in four chunks, from `commit` after the last push to the
same moment. `--loaded`: with two busy loops beside. Both processes read one monotonic clock.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np

from kvrelay.connector.base import (
    Expectation,
    GrantedRange,
    GrantPlan,
    Handover,
    Landed,
    Offer,
    Offered,
    Released,
    SessionUp,
    TokenRange,
)
from kvrelay.connector.checksum import token_digest
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import OutputToken, RequestKey
from kvrelay.engine.shared_memory import SharedMemory

BLOCK_SIZE = 16
FOREVER = float("inf")
HANDOVER = Handover(first_tokens=(OutputToken(choice=0, token_id=1),))
BUSY = "while True: sum(range(10000))"


@dataclass(frozen=True, slots=True)
class Shape:
    """What travels."""

    block_bytes: int
    num_blocks: int  # of each pool

    @property
    def layout(self) -> KVLayout:
        head_dim = self.block_bytes // (2 * BLOCK_SIZE * 2)
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=BLOCK_SIZE, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one transfer: seconds of the shared monotonic clock."""

    pushed_at: float  # the first push
    committed_at: float
    landed_at: float


class PrefillEnd:
    """P's side: runs one transfer after another to the D that `decode_end` starts."""

    def __init__(self, shape: Shape, transport: str) -> None:
        self._shape = shape
        self._woken = threading.Event()
        self._num_transfers = 0
        size = (shape.num_blocks, shape.block_bytes)
        self.region = np.ones(size, np.uint8)
        self._sender = make_sender(
            region=self.region,
            layout=shape.layout,
            fingerprint="bench",
            epoch="p",
            secret="",
            wake_up=self._woken.set,
            transport=transport,  # type: ignore[arg-type]
        )
        arguments = [sys.executable, __file__, "--decode", transport, str(shape.block_bytes), str(shape.num_blocks)]
        self._decode = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._sender.connect("d", self._hear())
        self._wait(SessionUp)
        self._hear()  # D's pool is all there

    def transfer(self, block_ids: list[int], num_missing: int, num_chunks: int) -> Timing:
        """One prompt that fills these blocks of P; D lacks its last `num_missing` blocks."""
        key = RequestKey(f"r{self._num_transfers}", 0)
        self._num_transfers += 1
        num_tokens = len(block_ids) * BLOCK_SIZE
        self._say(f"{key.request_id} {num_tokens} {num_missing}")
        self._hear()
        self._sender.offer(
            Offer(
                key=key,
                peer_epoch="d",
                num_tokens=num_tokens,
                token_digest=token_digest([num_tokens]),
                block_ids=tuple(block_ids),
                deadline=FOREVER,
            )
        )
        self._hear()  # granted
        while self._sender.statistics().states != {"SENDING": 1}:
            time.sleep(0.0002)
        pushed_at = time.monotonic()
        chunk = -(-len(block_ids) // num_chunks) * BLOCK_SIZE
        for start in range(0, num_tokens, chunk):
            self._sender.push(key, TokenRange(start, min(num_tokens, start + chunk)))
            if num_chunks > 1 and start + chunk < num_tokens:  # the next one takes time to compute
                time.sleep(0.02)
        committed_at = time.monotonic()
        self._sender.commit(key, HANDOVER)
        landed_at = float(self._hear())
        self._wait(Released)
        return Timing(pushed_at, committed_at, landed_at)

    def close(self) -> None:
        self._sender.close()
        self._decode.communicate("")

    def _say(self, line: str) -> None:
        assert self._decode.stdin is not None
        self._decode.stdin.write(line + "\n")
        self._decode.stdin.flush()

    def _hear(self) -> str:
        assert self._decode.stdout is not None
        line = self._decode.stdout.readline().strip()
        assert line, "the decode end is gone"
        return line

    def _wait(self, kind: Any) -> None:
        while not any(isinstance(event, kind) for event in self._sender.events()):
            self._woken.wait(5)
            self._woken.clear()


def decode_end(transport: str, shape: Shape) -> None:
    """D's side: grants random blocks of its pool, and says when a transfer has landed."""
    woken = threading.Event()
    memory = SharedMemory.create(shape.num_blocks * shape.block_bytes, "kvrelay-bench")
    region = np.frombuffer(memory.buffer, np.uint8).reshape(shape.num_blocks, shape.block_bytes)
    memory.populate(lambda: False)
    region[:] = 0
    receiver = make_receiver(
        region=region,
        region_fd=memory.descriptor,
        layout=shape.layout,
        fingerprint="bench",
        epoch="d",
        secret="",
        wake_up=woken.set,
        transport=transport,  # type: ignore[arg-type]
    )

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def wait(kind: Any) -> float:
        while not any(isinstance(event, kind) for event in receiver.events()):
            woken.wait()
            woken.clear()
        return time.monotonic()

    say(receiver.address())
    wait(SessionUp)
    say("up")
    chooser = random.Random(3)
    for line in sys.stdin:
        request_id, num_tokens, num_missing = line.split()
        key, end = RequestKey(request_id, 0), int(num_tokens)
        start = end - int(num_missing) * BLOCK_SIZE
        receiver.expect(
            Expectation(key=key, peer_epoch="p", num_tokens=end, token_digest=token_digest([end]), deadline=FOREVER)
        )
        say("expected")
        wait(Offered)
        blocks = tuple(chooser.sample(range(shape.num_blocks), int(num_missing)))
        receiver.grant(key, GrantPlan((GrantedRange(start, end, blocks),) if blocks else ()))
        say("granted")
        say(repr(wait(Landed)))
    receiver.close()


def memcpy_rate(region: Any, block_ids: list[int]) -> float:
    """Bytes a second of a plain loop over these blocks, into others of the same memory's kind. The best of three."""
    target = np.zeros_like(region)
    places = list(zip(block_ids, random.Random(3).sample(range(len(region)), len(block_ids)), strict=True))
    size, best = region.shape[1], 0.0
    addresses = [(target.ctypes.data + to * size, region.ctypes.data + of * size) for of, to in places]
    for _ in range(3):
        started_at = time.perf_counter()
        for to, of in addresses:
            ctypes.memmove(to, of, size)
        best = max(best, len(addresses) * size / (time.perf_counter() - started_at))
    return best


@contextmanager
def load(is_loaded: bool) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 if is_loaded else 0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def percentiles(seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=100)
    return f"p50 {1e6 * median(seconds):.0f} us, p99 {1e6 * cuts[98]:.0f} us, of {len(seconds)}"


def measure(transport: str, block_bytes: int, total_bytes: int, repeats: int) -> None:
    shape = Shape(block_bytes, max(64, 2 * total_bytes // block_bytes))
    num_blocks = total_bytes // block_bytes
    end = PrefillEnd(shape, transport)
    chooser = random.Random(1)
    blocks = chooser.sample(range(shape.num_blocks), num_blocks)
    memcpy = memcpy_rate(end.region, blocks)
    timings = [end.transfer(blocks, num_blocks, 1) for _ in range(5)]
    rates = [total_bytes / (timing.landed_at - timing.pushed_at) for timing in timings]
    print(
        f"{transport} {block_bytes // 1024} KiB: {max(rates) / 1e9:.1f} GB/s (median {median(rates) / 1e9:.1f}), "
        f"a loop of memmove {memcpy / 1e9:.1f}",
        flush=True,
    )
    nothing = [end.transfer(blocks[:1], 0, 1) for _ in range(repeats)]
    print(f"  control: {percentiles([t.landed_at - t.committed_at for t in nothing])}", flush=True)
    prompt = blocks[:64]  # 1,024 tokens
    exposed = [end.transfer(prompt, 64, 4) for _ in range(repeats // 2)]
    print(f"  exposed: {percentiles([t.landed_at - t.committed_at for t in exposed])}", flush=True)
    end.close()


def main() -> None:
    if sys.argv[1:2] == ["--decode"]:
        decode_end(sys.argv[2], Shape(int(sys.argv[3]), int(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[16, 64, 360])
    parser.add_argument("--total-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, loaded: {options.loaded}", flush=True)
    with load(options.loaded):
        for block_kib in options.block_kib:
            measure(options.transport, block_kib * 1024, options.total_mib * 2**20, options.repeats)


if __name__ == "__main__":
    main()
