"""A node's own gRPC: the standard health service, reflection, and Stats. The requests come over the links."""

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.engine.errors import ConfigError
from kvrelay.engine.metrics import process_statistics
from kvrelay.node import wire
from kvrelay.node.report import Snapshot
from kvrelay.proto import node_pb2, node_pb2_grpc

_SERVICE = node_pb2.DESCRIPTOR.services_by_name["Node"].full_name


class _NodeService(node_pb2_grpc.NodeServicer):
    def __init__(self, stats: Callable[[], node_pb2.NodeStats]) -> None:
        self._stats = stats

    async def Stats(  # noqa: N802 (gRPC's name)
        self, request: node_pb2.StatsRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> node_pb2.NodeStats:
        return self._stats()


class NodeServer:
    """Serves from `start` to `stop`; health says NOT_SERVING once `drain` was called, and while it is told so."""

    def __init__(self, role: str, epoch: str, name: str, snapshot: Callable[[], Snapshot]) -> None:
        # A port that another process has is an error, not a half of its connections.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        node_pb2_grpc.add_NodeServicer_to_server(
            _NodeService(lambda: wire.write_stats(role, epoch, name, snapshot(), process_statistics())), self._server
        )
        reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, bind: str, port: int) -> int:
        """Returns: the port it listens on. Raises: ConfigError if it cannot be had."""
        try:
            port = self._server.add_insecure_port(f"{bind}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {bind}:{port}: {error}") from error
        await self._server.start()
        await self.set_healthy(True)
        return port

    async def set_healthy(self, is_healthy: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in ("", _SERVICE):
            await self._health.set(service, status.SERVING if is_healthy else status.NOT_SERVING)

    async def drain(self) -> None:
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self._server.stop(grace=None)
