"""`kvrelay health`: whether a role serves, for the probes of containers and of init systems."""

import asyncio

from kvrelay.cli.client import RouterClient
from kvrelay.cli.config import HealthConfig
from kvrelay.cli.main import ExitCode
from kvrelay.engine.errors import Unavailable


def run(config: HealthConfig) -> int:
    """Ask once. Returns: the exit code. Raises: KvrelayError if nobody answers."""
    return asyncio.run(_ask(config))


async def _ask(config: HealthConfig) -> int:
    async with RouterClient(config.address) as client:
        if not await client.is_serving(timeout_s=config.timeout_s):
            raise Unavailable(f"{config.address} does not serve: it drains")
    print("serving")
    return ExitCode.OK
