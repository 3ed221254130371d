"""`kvrelay up` against vLLM's server, both on all cores, under the loads of `kvrelay bench serve`, in turns.

    .venv/bin/python bench/peers/serve.py

Run it with nothing beside it; setup.sh makes vLLM. Both servers are up all the time, and one of them gets a load:
kvrelay, vLLM, kvrelay, vLLM. Both get the same token ids at the same times, and what they took is computed by the same
code, from the scheduled arrivals; each pass has a cache salt of its own. kvrelay is asked over gRPC, vLLM over HTTP.
"""

import asyncio
import os
import secrets
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import peers
import tyro

from kvrelay.cli import bench_report as report, bench_serve
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_server import RPC_TIMEOUT_S, server_of
from kvrelay.cli.bench_statistics import Limits, LoadSummary, summarise
from kvrelay.cli.client import RouterClient

READY_TIMEOUT_S = 900.0  # vLLM compiles the model at its first start
MODEL = "smollm2"


@dataclass(frozen=True, kw_only=True)
class Options:
    rates: tuple[float, ...] = (0.8, 1.2, 1.6)
    """Open loops: arrivals a second."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Closed loops: requests under way at once."""
    num_prompts: int = 48
    """Requests of each pass."""
    input_len: str = "512"
    """Prompt tokens, as `kvrelay bench serve` takes them."""
    output_len: str = "64"
    """Tokens to generate, likewise."""
    repeats: int = 2
    """Passes of each load on each server; the table has the medians of their figures."""
    seed: int = 0
    """Seed of the first pass; the next has the next one."""
    up: str = ""
    """Flags for `kvrelay up`, such as --up="--threads 2"."""
    folder: str = str(peers.FOLDER)
    """Where setup.sh put vLLM."""
    json: str = ""
    """File for all figures as JSON; -: standard output, and the table goes to standard error."""


@contextmanager
def vllm_serve(side: peers.Side) -> Iterator[str]:
    """vLLM's server, until the end of the block. Returns: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [side.python, "-m", "vllm.entrypoints.cli.main", "serve", side.model, "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    with peers.started(side, command) as server:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_healthy(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM did not start: {side.log}")
            time.sleep(1)
        yield f"127.0.0.1:{port}"


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def loads(options: Options) -> dict[str, dict[str, Any]]:
    """What makes each load, by its name."""
    return {f"{rate:g} a second": {"rate": rate} for rate in options.rates} | {
        f"{users} at once": {"concurrency": users} for users in options.concurrency
    }


async def run(options: Options, router: str, vllm: str) -> dict[str, dict[str, list[LoadSummary]]]:
    """Summaries by load and server, one a pass."""
    found: dict[str, dict[str, list[LoadSummary]]] = {}
    async with RouterClient(router) as client:
        model = await client.model(timeout_s=RPC_TIMEOUT_S)
    for name, load in loads(options).items():
        found[name] = {"kvrelay": [], "vllm": []}
        for i in range(options.repeats):
            config = ServeBenchConfig(
                **load,
                num_prompts=options.num_prompts,
                input_len=options.input_len,
                output_len=options.output_len,
                seed=options.seed + i,
                cache_salt=secrets.token_hex(8),
            )
            sides = {
                "kvrelay": replace(config, router=router),
                "vllm": replace(config, http=f"http://{vllm}", model=MODEL),
            }
            for by, side in sides.items():
                async with server_of(side) as server:
                    records = await bench_serve.measure(side, model, server.asker())
                summary = summarise(records, Limits())
                found[name][by].append(summary)
                print(f"{name}, {by}: {summary.duration_s:.1f} s", file=sys.stderr)
    return found


# What of a summary is in the table.
COLUMNS = {
    "TTFT p50, ms": lambda summary: summary.ttft_ms.p50,
    "TTFT p99, ms": lambda summary: summary.ttft_ms.p99,
    "TPOT p50, ms": lambda summary: summary.tpot_ms.p50,
    "TPOT p99, ms": lambda summary: summary.tpot_ms.p99,
    "ITL p99, ms": lambda summary: summary.itl_ms.p99,
    "tokens/s out": lambda summary: summary.output_tokens_per_s,
}


def table(found: dict[str, dict[str, list[LoadSummary]]]) -> list[str]:
    """Medians of the passes' figures, and the medians of the pairs' ratios."""
    rows = [["", "", *COLUMNS, "failed"]]
    for load, by_server in found.items():
        for server, summaries in by_server.items():
            cells = [f"{median(map(value, summaries)):,.1f}" for value in COLUMNS.values()]
            rows.append([load, server, *cells, str(sum(summary.num_failed for summary in summaries))])
        pairs = list(zip(by_server["kvrelay"], by_server["vllm"], strict=True))
        ratios = [f"{median(value(a) / value(b) for a, b in pairs):.2f}" for value in COLUMNS.values()]
        rows.append(["", "kvrelay / vllm", *ratios, ""])
    return report.align(rows, "<<")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    peers.end_cleanly_on_sigterm()
    folder, cores = Path(options.folder), sorted(os.sched_getaffinity(0))
    place = report.machine()
    theirs, ours = peers.peer("vllm", folder, cores), peers.kvrelay(folder)
    with vllm_serve(theirs) as vllm, peers.kvrelay_up(ours, shlex.split(options.up)) as router:
        found = asyncio.run(run(options, router, vllm))
    rows = {
        load: {server: [asdict(summary) for summary in summaries] for server, summaries in by_server.items()}
        for load, by_server in found.items()
    }
    figures = report.as_json("bench/peers/serve.py", options, place, loads=rows)
    headline = f"kvrelay up {options.up}; tokens in {options.input_len}, out {options.output_len}"
    report.publish([place.line(), headline, "", *table(found)], figures, options.json)


if __name__ == "__main__":
    main()
