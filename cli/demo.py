"""`kvrelay demo`: the whole race once, and where its time went."""

import time

from kvrelay.cli import report
from kvrelay.cli.client import Piece, RouterClient
from kvrelay.cli.config import DemoConfig
from kvrelay.cli.main import ExitCode
from kvrelay.cli.supervisor import local_cluster, run_until_stopped
from kvrelay.engine.model_store import load_info


def run(config: DemoConfig) -> int:
    """Start, ask, show, stop. Returns: the exit code. Raises: KvrelayError."""
    load_info(config.model)
    return ExitCode.OK if run_until_stopped(lambda: _race(config)) else ExitCode.INTERRUPTED


async def _race(config: DemoConfig) -> None:
    num_nodes = config.prefill + config.decode
    print(f"starting a router and {num_nodes} nodes, each a process of its own", flush=True)
    started = time.monotonic()
    async with local_cluster(config) as cluster:
        print(f"ready after {time.monotonic() - started:.1f} s")
        print(f"  {'router':<10} {cluster.router:<22} pid {cluster.pids['router']}")
        for node in sorted(cluster.nodes, key=lambda node: node.role, reverse=True):
            print(f"  {node.name:<10} {node.address:<22} pid {cluster.pids[node.name]}")
        print(f"\n> {config.prompt}", flush=True)
        async with RouterClient(cluster.router) as client:
            last = await _ask(client, config)
        print("\n")
        print(*report.describe(last.usage, last.timings, last.handoff), sep="\n")
        stopped = time.monotonic()
    print(f"\nstopped after {time.monotonic() - stopped:.1f} s")


async def _ask(client: RouterClient, config: DemoConfig) -> Piece:
    """Stream the answer to standard output. Returns: its last piece."""
    last = Piece()
    sampling = {"max_tokens": config.max_tokens, "temperature": 0.0}
    async for piece in client.generate(config.prompt, sampling=sampling):
        print(piece.text, end="", flush=True)
        last = piece
    return last
