"""What a router costs: CPU a token it carries, the time it adds before the first token, and many streams at once.

    .venv/bin/python bench/router_cost.py [--edge grpc http] [--streams 64] [--step-ms 20] [--open-streams 1000]

Run it with nothing beside it. The model must be in the cache (only its tokenizer is used): a first `kvrelay demo`
puts it there. Router, nodes and clients are three processes. The nodes compute nothing (fake_engine.py): each has its
first token at once, and a decode step that takes `--step-ms` tells one token of every stream. CPU is the router
process's own, as the kernel counts it; the time to the first token is the router's, with no work in it but its own,
two hops to a node and the node's answer.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bare_streams
import fake_engine
import grpc
import psutil

from kvrelay.cli.client import RouterClient
from kvrelay.engine import model_store
from kvrelay.engine.process import READY_FD
from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc

MODEL = "smollm2"
TEXT_IDS = (504, 2644, 282, 4649, 314, 7042, 30, 198)  # plain words: every one shows text
PROMPT_IDS = list(range(1000, 1064))
MAX_TOKENS = 256

# Asks for one answer. Returns: how many tokens came, and the router's own time to the first, in milliseconds.
Ask = Callable[[int], Awaitable[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Cost:
    """One run's figures."""

    cpu_us_per_token: float
    ttft_ms: list[float]
    num_tokens: int
    num_lost: int


async def ask_grpc(stub: inference_pb2_grpc.InferenceStub, max_tokens: int) -> tuple[int, float]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT_IDS),
        sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )
    num_tokens, ttft_ms = 0, 0.0
    async for message in stub.Generate(request):
        num_tokens += len(message.token_ids)
        if message.HasField("timings"):
            ttft_ms = message.timings.ttft_ms
    return num_tokens, ttft_ms


async def ask_http(address: str, max_tokens: int) -> tuple[int, float]:
    """Hand-made HTTP: the client shall not be what limits. Counts the events that carry text, one a token here."""
    host, port = address.rsplit(":", 1)
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT_IDS,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    try:
        num_tokens, rest = 0, b""
        async for piece in _pieces(reader):
            *lines, rest = (rest + piece).split(b"\n")
            num_tokens += sum(b'"text":"' in line and b'"text":""' not in line for line in lines)
        return num_tokens, 0.0
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(2**16):
        yield piece


async def run(ask: Ask, router: psutil.Process, num_streams: int, num_rounds: int, max_tokens: int) -> Cost:
    """So many streams at once, several times over."""
    before = sum(router.cpu_times()[:2])
    answers: list[tuple[int, float]] = []
    for _ in range(num_rounds):
        answers += await asyncio.gather(*(ask(max_tokens) for _ in range(num_streams)))
    cpu_s = sum(router.cpu_times()[:2]) - before
    num_tokens = sum(answer[0] for answer in answers)
    return Cost(
        cpu_us_per_token=1e6 * cpu_s / max(1, num_tokens),
        ttft_ms=[answer[1] for answer in answers],
        num_tokens=num_tokens,
        num_lost=num_streams * num_rounds * max_tokens - num_tokens,
    )


async def measure(edge: str, grpc_address: str, http_address: str, pid: int, options: argparse.Namespace) -> Any:
    router = psutil.Process(pid)
    async with RouterClient(grpc_address) as client:
        await wait_for_nodes(client)
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def ask(max_tokens: int) -> tuple[int, float]:
            if edge == "grpc":
                return await ask_grpc(stub, max_tokens)
            return await ask_http(http_address, max_tokens)

        await run(ask, router, 2, 1, MAX_TOKENS)  # what is made at first use
        loaded = [await run(ask, router, options.streams, 1, MAX_TOKENS) for _ in range(options.rounds)]
        alone = await run(ask, router, 1, 50, 2) if edge == "grpc" else None
        many = await run(ask, router, options.open_streams, 1, 64)
    bare = await measure_bare(edge, options)
    return {
        "edge": edge,
        "bare_us_per_token": {"median": round(statistics.median(bare), 1), "all": bare},
        "cpu_us_per_token": {
            "median": round(statistics.median(cost.cpu_us_per_token for cost in loaded), 1),
            "all": [round(cost.cpu_us_per_token, 1) for cost in loaded],
        },
        "added_ttft_ms_p50": round(statistics.median(alone.ttft_ms), 2) if alone else None,
        "open_streams": options.open_streams,
        "open_streams_us_per_token": round(many.cpu_us_per_token, 1),
        "tokens_lost": sum(cost.num_lost for cost in (*loaded, many)),
    }


async def measure_bare(edge: str, options: argparse.Namespace) -> list[float]:
    """What the same streams cost whoever only writes prepared messages to them, in microseconds each."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=bare_streams.serve, args=(edge, options.step_ms / 1e3, theirs), daemon=True)
    server.start()
    try:
        port = await asyncio.to_thread(ours.recv)
        process = psutil.Process(server.pid)
        found = []
        for _ in range(options.rounds):
            before = sum(process.cpu_times()[:2])
            num_messages = await bare_streams.read(edge, port, options.streams)
            found.append(round(1e6 * (sum(process.cpu_times()[:2]) - before) / num_messages, 1))
        return found
    finally:
        server.kill()
        server.join()


def serve_nodes(router: str, step_s: float) -> None:
    """Both nodes, until killed."""
    info = model_store.load_info(MODEL)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            for role in ("prefill", "decode"):
                group.create_task(fake_engine.FakeNode(role, router, info, TEXT_IDS, step_s).serve())

    asyncio.run(both())


@contextmanager
def running_router(*flags: str) -> Any:
    """A router process, and what it says when it is ready."""
    reading, writing = os.pipe()
    router = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.cli", "router", "--model", MODEL, "--port", "0", *flags],
        env=os.environ | {READY_FD: str(writing)},
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield router.pid, json.loads(pipe.readline())
    finally:
        router.terminate()
        router.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edge", nargs="+", default=["grpc", "http"], choices=["grpc", "http"], help="which APIs")
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="runs, of which the median counts (default: 5)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a decode step takes (default: 20)")
    parser.add_argument("--open-streams", type=int, default=1000, help="streams of the largest run (default: 1,000)")
    options = parser.parse_args()
    flags = ["--http-port", "0"] if "http" in options.edge else []
    with running_router(*flags) as (pid, ready):
        nodes = multiprocessing.get_context("spawn").Process(
            target=serve_nodes, args=(ready["grpc"], options.step_ms / 1e3), daemon=True
        )
        nodes.start()
        try:
            for edge in options.edge:
                figures = asyncio.run(measure(edge, ready["grpc"], ready.get("http", ""), pid, options))
                print(json.dumps(figures), flush=True)
        finally:
            nodes.terminate()
            nodes.join()


async def wait_for_nodes(client: RouterClient) -> None:
    """Until both are there, and the prefill node has said that it can push to the other."""
    async with asyncio.timeout(30):
        while not any(node.sessions for node in await client.nodes(timeout_s=5)):  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
