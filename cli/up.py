"""`kvrelay up`: a router and its nodes on this machine, until Ctrl-C."""

import asyncio

from kvrelay.cli.config import UpConfig
from kvrelay.cli.main import ExitCode
from kvrelay.cli.supervisor import Cluster, local_cluster, run_until_stopped
from kvrelay.engine.model_store import load_info


def run(config: UpConfig) -> int:
    """Serve until a signal. Returns: the exit code. Raises: KvrelayError if the model, or a role, fails."""
    load_info(config.model)  # here, so that it is fetched once, and a broken one is told before a start
    served = False

    async def serve() -> None:
        nonlocal served
        async with local_cluster(config) as cluster:
            print(ready_line(config, cluster), flush=True)
            served = True
            await asyncio.Event().wait()

    run_until_stopped(serve)
    return ExitCode.OK if served else ExitCode.INTERRUPTED


def ready_line(config: UpConfig, cluster: Cluster) -> str:
    """One line: what is served, and where."""
    nodes = ", ".join(f"{node.name} {node.address}" for node in sorted(cluster.nodes, key=lambda node: node.name))
    http = f" and http://{cluster.http}" if cluster.http else ""
    return f"ready: {config.model} at {cluster.router}{http} ({nodes}); Ctrl-C stops"
