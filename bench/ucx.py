"""KV bytes over UCX between two processes: the product's transport beside a minimal program on ucxx's tags.

    bench/ucx.py [--tls all|tcp,self] [--block-kib 64] [--loaded]

Both move the same blocks, scattered over both pools, in one run of turns. The minimal program sends each block as a
message from its place and receives it in its place; it polls, and hands nothing back when its peer dies. It needs
`pip install ucxx-cu12`, which is not among kvrelay's dependencies.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

POOL_BYTES = 256 * 2**20
NONCE = b"s" * 32
DEPTH = 16  # tags on their way


def pools(block_bytes: int, fill: int, seed: int) -> tuple[Any, list[int]]:
    num_blocks = POOL_BYTES // block_bytes
    region = np.full((num_blocks, block_bytes), fill, np.uint8)
    return region, np.random.default_rng(seed).permutation(num_blocks).tolist()


# --- the product's transport ---


def product_read(pipe: Connection, block_bytes: int, num_rounds: int) -> None:
    from kvrelay.connector.messages import GrantId
    from kvrelay.connector.transport.ucx_reader import UcxReader
    from kvrelay.engine.clock import MonotonicClock
    from kvrelay.engine.request import RequestKey

    class Events:
        def all_in(self, grant: GrantId) -> None:
            pipe.send("in")

        def reader_idle(self, grant: GrantId) -> None: ...
        def read_failed(self, session_nonce: bytes, reason: str) -> None: ...
        def fenced(self, session_nonce: bytes) -> None: ...

    region, places = pools(block_bytes, 0, 3)
    reader = UcxReader(region, MonotonicClock(), "127.0.0.1", 0, "")
    reader.start(Events())
    reader.begin_session(NONCE)
    for i in range(num_rounds):
        reader.accept(GrantId(NONCE, b"g" * 16, RequestKey(str(i), 0)), places)
    pipe.send(reader.endpoint.address)
    pipe.recv()
    before = time.process_time()
    time.sleep(5)
    pipe.send(time.process_time() - before)
    assert region.all()
    reader.close()


def product(block_bytes: int, num_rounds: int) -> tuple[list[float], str]:
    from kvrelay.connector.messages import GrantId
    from kvrelay.connector.transport.base import Copy
    from kvrelay.connector.transport.ucx_writer import UcxWriter
    from kvrelay.engine.clock import MonotonicClock
    from kvrelay.engine.request import RequestKey

    class Events:
        def written(self, grant: GrantId, num_bytes: int) -> None: ...
        def writer_idle(self, grant: GrantId) -> None: ...
        def write_failed(self, session_nonce: bytes, reason: str) -> None:
            raise SystemExit(reason)

    region, places = pools(block_bytes, 1, 4)
    ours, theirs = mp.Pipe()
    child = mp.get_context("spawn").Process(target=product_read, args=(theirs, block_bytes, num_rounds))
    child.start()
    writer = UcxWriter(region, MonotonicClock())
    link = writer.connect(NONCE, ours.recv(), Events())
    seconds = []
    for i in range(num_rounds):
        copies = [Copy(block, 0, index, 0, block_bytes) for index, block in enumerate(places)]
        start = time.perf_counter()
        link.write(GrantId(NONCE, b"g" * 16, RequestKey(str(i), 0)), copies)
        ours.recv()
        seconds.append(time.perf_counter() - start)
    ours.send("idle")
    before = time.process_time()
    idle_read_s = ours.recv()
    idle = f"idle for 5 s with the connection open: P {(time.process_time() - before) / 5:.2%} of a core"
    child.join()
    writer.close()
    return seconds, f"{idle}, D {idle_read_s / 5:.2%}"


# --- the minimal program ---


def tags() -> tuple[Any, Any, Any]:
    import ucxx._lib.libucxx as ucxx
    from ucxx._lib.arr import Array

    context = ucxx.UCXContext({}, feature_flags=(ucxx.Feature.TAG, ucxx.Feature.WAKEUP))
    return ucxx, Array, ucxx.UCXWorker(context)


def run_tags(worker: Any, begin: Any, items: list[Any]) -> None:
    """All of them, DEPTH at a time."""
    waiting: list[Any] = []
    for item in items:
        waiting.append(begin(item))
        while len(waiting) >= DEPTH:
            worker.progress()
            waiting = [request for request in waiting if not request.completed]
    while waiting:
        worker.progress()
        waiting = [request for request in waiting if not request.completed]


def minimal_read(pipe: Connection, block_bytes: int, num_rounds: int) -> None:
    ucxx, as_array, worker = tags()
    endpoints = []
    listener = ucxx.UCXListener.create(
        worker, 0, lambda request: endpoints.append(listener.create_endpoint_from_conn_request(request, True))
    )
    pipe.send(listener.port)
    while not endpoints:
        worker.progress()
    region, places = pools(block_bytes, 0, 3)
    arrays = [as_array(region[i]) for i in places]
    tag = ucxx.UCXXTag(7)
    for _ in range(num_rounds):
        run_tags(worker, lambda array: endpoints[0].tag_recv(array, tag), arrays)
        pipe.send("in")
    assert region.all()
    pipe.recv()


def minimal(block_bytes: int, num_rounds: int) -> tuple[list[float], str]:
    ours, theirs = mp.Pipe()
    child = mp.get_context("spawn").Process(target=minimal_read, args=(theirs, block_bytes, num_rounds))
    child.start()
    ucxx, as_array, worker = tags()
    endpoint = ucxx.UCXEndpoint.create(worker, "127.0.0.1", ours.recv(), True)
    region, places = pools(block_bytes, 1, 4)
    arrays = [as_array(region[i]) for i in places]
    tag = ucxx.UCXXTag(7)
    seconds = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        run_tags(worker, lambda array: endpoint.tag_send(array, tag), arrays)
        while not ours.poll(0):
            worker.progress()
        ours.recv()
        seconds.append(time.perf_counter() - start)
    ours.send("end")
    child.join()
    return seconds, ""


def spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tls", default="all")
    parser.add_argument("--block-kib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaded", action="store_true", help="two busy processes beside it")
    parser.add_argument("--only", choices=("minimal", "kvrelay"), default="")
    options = parser.parse_args()
    os.environ |= {"UCX_TLS": options.tls, "UCX_NET_DEVICES": "lo"}
    os.environ |= {"UCX_MM_ERROR_HANDLING": "y", "UCX_CMA_MEMORY_INVALIDATE": "y"}
    busy = [mp.get_context("spawn").Process(target=spin, daemon=True) for _ in range(2 * options.loaded)]
    for process in busy:
        process.start()
    threading.Event().wait(0.5 if busy else 0)
    for name, move in (("minimal", minimal), ("kvrelay", product)):
        if options.only not in ("", name):
            continue
        seconds, note = move(options.block_kib * 1024, options.rounds)
        rates = [POOL_BYTES / s / 1e9 for s in seconds]
        print(f"{name} {options.tls} {options.block_kib} KiB{' loaded' * options.loaded}:", end=" ")
        print(f"best {max(rates):.2f}, median {statistics.median(rates):.2f} GB/s {note}")
    for process in busy:
        process.kill()


if __name__ == "__main__":
    main()
