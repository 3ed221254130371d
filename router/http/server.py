"""The HTTP server: uvicorn's protocol on the router's own event loop, without uvicorn's server.

That one wakes ten times a second to look whether it should end, and an idle router uses no CPU.
"""

import asyncio
import contextlib
import logging

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvrelay.engine.errors import ConfigError

_BACKLOG = 1024
_KEEP_ALIVE_S = 75


class HttpServer:
    """Serves an ASGI application from `start` to `stop`. Belongs to the event loop."""

    def __init__(self, app: ASGIApp, max_connections: int) -> None:
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what goes wrong is said where it is answered
        self._state = ServerState()
        self._config = Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            limit_concurrency=max_connections,
        )
        self._config.load()

    async def start(self, host: str, port: int) -> int:
        """Returns: the port it listens on. Raises: ConfigError if it cannot be had."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._make_protocol, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"http_port = {port}: cannot listen on {host}: {error.strerror or error}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no new connection, let answers end that are on their way, then close what is left."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=grace_s)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            with contextlib.suppress(AttributeError):  # no transport yet
                connection.transport.abort()

    def _make_protocol(self) -> asyncio.Protocol:
        return HttpToolsProtocol(self._config, self._state, app_state={})
