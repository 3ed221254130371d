"""The router's gRPC edge: clients, nodes, health, reflection. Converts, and leaves everything else to others."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.engine import secret
from kvrelay.engine.clock import Clock
from kvrelay.engine.config import NO_PORT
from kvrelay.engine.errors import ConfigError, Unavailable
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.metrics import process_statistics
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.traces import Tracing
from kvrelay.proto import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc
from kvrelay.router import cluster_wire, wire
from kvrelay.router.answer import AnswerCalls, Context, begin_answer, ending_after
from kvrelay.router.cluster_wire import RouterView
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Dispatcher, DispatchStatistics
from kvrelay.router.http import HttpServer, make_http
from kvrelay.router.keys import ApiKeys, AskForKey
from kvrelay.router.links import Links
from kvrelay.router.live import LiveFeed
from kvrelay.router.metrics import RequestMetrics
from kvrelay.router.nodes import NodesServicer
from kvrelay.router.registry import Registry
from kvrelay.router.service import InferenceService
from kvrelay.router.tokenizer import Tokenizer
from kvrelay.router.trace_context import read_headers
from kvrelay.router.traces import RequestTraces

log = get_logger(__name__)

INFERENCE = "kvrelay.v1.Inference"
_SERVICES = (INFERENCE, "kvrelay.v1.Nodes", "kvrelay.v1.Cluster", health.SERVICE_NAME, reflection.SERVICE_NAME)
_STOP_GRACE_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """What clients call. Errors are answered around it (AnswerCalls)."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        service = self._service
        with service.admission.admit_request() as stay:
            raw = wire.read_request(request)
            if raw.trace is None:  # as instrumented clients send it
                raw = replace(raw, trace=read_headers(_texts(context)))
            prepared = await service.prepare(raw, context.time_remaining())
            async with (
                ending_after(service.remaining_s(prepared)),
                aclosing(service.generate(raw, prepared, on_output=stay.begin)) as outputs,
            ):
                has_begun = False
                async for output in outputs:
                    message = wire.write_output(raw.request_id, output)
                    if not has_begun:  # not before there is something: until then clients may try again elsewhere
                        await begin_answer(context)
                        has_begun = True
                    else:  # so that gRPC's thread is woken once for what a step brought all streams (bench/README.md)
                        await asyncio.sleep(0)
                    await context.write(message)

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return wire.write_model(self._service.info, self._service.max_model_len())

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        with self._service.admission.admit():
            prompt = wire.read_prompt(request)
            token_ids = await self._service.tokenize(request.model, prompt)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        with self._service.admission.admit():
            text = await self._service.detokenize(
                request.model, request.token_ids, skip_special_tokens=request.skip_special_tokens
            )
        return inference_pb2.DetokenizeResponse(text=text)


def _texts(context: Context) -> Iterator[tuple[str, str]]:
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield name, value


class ClusterServicer(node_pb2_grpc.ClusterServicer):
    """Who is there, and how it goes."""

    def __init__(self, view: Callable[[], RouterView], registry: Registry, clock: Clock) -> None:
        self._view = view
        self._registry = registry
        self._clock = clock

    async def GetCluster(  # noqa: N802
        self, request: node_pb2.GetClusterRequest, context: Context
    ) -> node_pb2.ClusterState:
        return cluster_wire.write_cluster(self._view(), self._registry, self._clock.now())


class RouterServer:
    """A router that serves: all its parts, put together. To be made and used on one event loop."""

    def __init__(self, config: RouterConfig, info: ModelInfo, cluster_secret: str, clock: Clock) -> None:
        """Raises: ModelError, ConfigError."""
        epoch = secret.new_epoch()
        tokenizer = Tokenizer.load(info)
        self._config = config
        self._clock = clock
        self.registry = Registry(config.max_nodes)
        self._http: HttpServer | None = None
        self._links = Links()
        self._metrics = RequestMetrics(clock)
        self.live = LiveFeed(self.registry, clock)
        observers = (self._metrics, self.live)
        self._traces: RequestTraces | None = None
        if config.otlp_endpoint:
            tracing = Tracing(config.otlp_endpoint, "kvrelay-router", epoch, clock)
            self._traces = RequestTraces(tracing, info.name)
        self._dispatcher = Dispatcher(self.registry, self._links, tokenizer, clock, observers, self._traces)
        self._service = InferenceService(
            config, info, tokenizer, self.registry, self._dispatcher, epoch=epoch, clock=clock
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._changed = asyncio.Event()
        keys = ApiKeys.of(config.api_key)
        self._server = grpc.aio.server(interceptors=[AskForKey(keys), AnswerCalls()], options=_options(config))
        if config.http_port != NO_PORT:
            self._http = make_http(self._service, keys, self.render_metrics, self.live)
        nodes = NodesServicer(
            self.registry,
            self._links,
            self._dispatcher,
            info,
            router_epoch=epoch,
            cluster_secret=cluster_secret,
            lease_s=config.node_lease_s,
            max_backlog=config.max_node_backlog,
            clock=clock,
            on_change=self._changed.set,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self._service), self._server)
        node_pb2_grpc.add_ClusterServicer_to_server(ClusterServicer(self.view, self.registry, clock), self._server)
        node_pb2_grpc.add_NodesServicer_to_server(nodes, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(_SERVICES, self._server)

    async def start(self) -> tuple[int, int]:
        """Listen. Returns: gRPC's port and HTTP's, which is -1 where there is none.

        Raises: ConfigError if an address cannot be had.
        """
        address = f"{self._config.bind}:{self._config.port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        http_port = NO_PORT if self._http is None else await self._http.start(self._config.bind, self._config.http_port)
        await self._health.set(INFERENCE, _NOT_SERVING)
        await self._server.start()
        self._follower = asyncio.create_task(self._follow_health())
        return port, http_port

    async def stop(self, drain_timeout_s: float) -> None:
        """Take nothing new, let what runs end in time, then end every stream."""
        await self._health.enter_graceful_shutdown()
        log.info("draining", extra=fields(num_requests=self.num_requests))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.admission.drain(), drain_timeout_s)
        self._dispatcher.close(Unavailable("this router is shutting down"))
        self._links.close(Unavailable("this router is shutting down"))
        if self._http is not None:
            await self._http.stop(_STOP_GRACE_S)
        await self._server.stop(_STOP_GRACE_S)
        self._follower.cancel()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        log.info("stopped", extra=fields(**asdict(self.statistics())))

    @property
    def num_requests(self) -> int:
        """Client calls that wait or run."""
        return self._service.admission.num_requests

    @property
    def num_waiting(self) -> int:
        """Requests that have no output yet."""
        return self._service.admission.num_waiting

    @property
    def num_refused(self) -> int:
        """Calls that found no room, since the start."""
        return self._service.admission.num_refused

    @property
    def draining(self) -> bool:
        return self._service.admission.draining

    def statistics(self) -> DispatchStatistics:
        return self._dispatcher.statistics()

    def view(self) -> RouterView:
        """What this router says of itself."""
        return RouterView(
            model=self._service.info.name,
            num_requests=self.num_requests,
            num_waiting=self.num_waiting,
            num_refused=self.num_refused,
            dispatch=self._dispatcher.statistics(),
            requests=self._metrics.statistics(),
            process=process_statistics(),
        )

    def render_metrics(self) -> bytes:
        """What Prometheus reads."""
        from kvrelay.router.exposition import render  # with its library, which a router needs at the first scrape

        return render(self.view(), self.registry, self._clock.now())

    async def _follow_health(self) -> None:
        """Requests can be served as long as there is a decode node to place them on."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._health.set(INFERENCE, _SERVING if self.registry.num_serving() else _NOT_SERVING)


def _options(config: RouterConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a port that another process has is an error, not a half of the connections
        ("grpc.max_receive_message_length", config.max_body_bytes),
        # A peer that vanished without a word is noticed by pings, and nodes may ping as often.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
