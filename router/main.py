"""The router as a process: read the model's facts, serve clients and nodes, drain on SIGTERM."""

import asyncio
from dataclasses import asdict, replace

from kvrelay import __version__
from kvrelay.engine import model_store, process
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.config import NO_PORT
from kvrelay.engine.log import configure, fields, get_logger
from kvrelay.engine.model_info import ModelInfo
from kvrelay.router.config import RouterConfig
from kvrelay.router.keys import ApiKeys
from kvrelay.router.server import RouterServer

log = get_logger(__name__)


def run(config: RouterConfig) -> int:
    """Run a router until it is told to stop. Blocking.

    Returns: the exit code, 0 after a drain. Raises: KvrelayError if it cannot start.
    """
    process.end_with_parent()
    configure("router", as_json=config.log_json)
    cluster_secret = process.cluster_secret()
    process.check_bind(config.bind, cluster_secret, config.insecure)
    log.info(
        "config",
        extra=fields(
            version=__version__, **asdict(replace(config, api_key=())), num_api_keys=len(ApiKeys.of(config.api_key))
        ),
    )
    info = model_store.load_info(config.model)
    asyncio.run(_serve(config, info, cluster_secret))
    return 0


async def _serve(config: RouterConfig, info: ModelInfo, cluster_secret: str) -> None:
    stop = process.stop_on_signals()
    server = RouterServer(config, info, cluster_secret, MonotonicClock())
    host = config.advertise or config.bind
    port, http_port = await server.start()
    addresses = {"grpc": f"{host}:{port}", "http": "" if http_port == NO_PORT else f"{host}:{http_port}"}
    log.info("listening", extra=fields(**addresses))
    process.settle_memory()
    process.announce_ready(role="router", **addresses)
    await stop.wait()
    await server.stop(config.drain_timeout_s)
