"""A node as a process: load the model, start the three kinds of thread, serve routers, drain on SIGTERM.

The event loop (this file and the links) never touches the engine's state: it posts messages to the engine thread and
gets reports back. The connector's thread is the role's; it wakes the engine thread when it has events.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvrelay import __version__
from kvrelay.engine import model_store, process, secret
from kvrelay.engine.clock import Clock, MonotonicClock
from kvrelay.engine.errors import KvrelayError
from kvrelay.engine.legs import CacheChange, Delta, Peer
from kvrelay.engine.log import configure, fields, get_logger
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.request import RequestKey
from kvrelay.engine.step import Executor
from kvrelay.engine.structured_output import FormCompiler
from kvrelay.engine.traces import Tracing
from kvrelay.node.config import NodeConfig
from kvrelay.node.core import NodeCore, OnReport
from kvrelay.node.engine_thread import EngineThread
from kvrelay.node.found_blocks import FoundBlocks
from kvrelay.node.intake import Intake
from kvrelay.node.link import NodeIdentity, RouterLink
from kvrelay.node.report import Snapshot, Start
from kvrelay.node.server import NodeServer
from kvrelay.node.traces import LegTraces

if TYPE_CHECKING:
    from kvrelay.engine.model_runner import ModelRunner  # and with it torch, which a process loads when it is set up

log = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What a role builds its core from."""

    info: ModelInfo
    executor: Executor
    epoch: str
    name: str
    cluster_secret: str
    advertise: str
    clock: Clock
    wake: Callable[[], None]
    on_report: OnReport


@dataclass(frozen=True, slots=True)
class Role:
    """What tells one node's process from another's."""

    name: str  # "prefill" or "decode"
    build: Callable[[NodeParts], tuple[NodeCore, str]]  # -> core and its connector's address, if others dial it
    receives_kv: bool = False  # others write into its pool


def run_node(config: NodeConfig, role: Role) -> int:
    """Run a node until it is told to stop. Blocking.

    Returns: the exit code: 0 after a drain, 1 if its engine died. Raises: KvrelayError if it cannot start.
    """
    process.end_with_parent()
    epoch = secret.new_epoch()
    name = config.name or f"{role.name}-{epoch[:4]}"
    configure(name, as_json=config.log_json)
    cluster_secret = process.cluster_secret()
    process.check_bind(config.bind, cluster_secret, config.insecure)
    log.info("config", extra=fields(version=__version__, epoch=epoch, **asdict(config)))
    # An idle node must use no CPU: OpenMP's threads wait without spinning. To be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    info = model_store.load_info(config.model)
    from kvrelay.engine.model_runner import ModelRunner  # torch takes seconds, and the variables above come first

    shares_pool = role.receives_kv and config.kv_transport in ("auto", "shm")
    runner = ModelRunner.load(info, config, shares_pool=shares_pool)
    return asyncio.run(_NodeProcess(config, role, epoch, name).serve(info, runner, cluster_secret))


class _NodeProcess:
    """The event loop's side of a node. Implements LinkEvents."""

    def __init__(self, config: NodeConfig, role: Role, epoch: str, name: str) -> None:
        self._config = config
        self._role = role
        self._epoch = epoch
        self._name = name
        self._clock: Clock = MonotonicClock()
        self._engine = EngineThread(self._on_engine_death, config.nice)
        self._links: tuple[RouterLink, ...] = ()
        self._peers: dict[str, tuple[Peer, ...]] = {}  # by router address
        self._found_blocks = FoundBlocks()
        self._traces: LegTraces | None = None
        if config.otlp_endpoint:
            self._traces = LegTraces(Tracing(config.otlp_endpoint, f"kvrelay-{role.name}", epoch, self._clock))

    async def serve(self, info: ModelInfo, runner: "ModelRunner", cluster_secret: str) -> int:
        """Serve until a signal, a router's Drain or the engine's death."""
        self._loop = asyncio.get_running_loop()
        self._stop = process.stop_on_signals()
        self._reported = asyncio.Event()
        self._health_changed = asyncio.Event()
        self._died = False
        self._core, connector_address = self._build(info, runner, cluster_secret)
        self._snapshot = self._core.snapshot()
        compiler = FormCompiler(info)
        if self._config.prepare_structured_output:
            await asyncio.to_thread(compiler.prepare)
        self._intake = Intake(self._core, self._engine, compiler, self._say)
        self._engine.start(self._core)
        server = NodeServer(self._role.name, self._epoch, self._name, self.statistics)
        running: list[asyncio.Task[None]] = []
        try:
            grpc_port = await server.start(self._config.bind, self._config.port)
            identity = self._identify(info, runner, cluster_secret, grpc_port, connector_address)
            log.info("listening", extra=fields(grpc=identity.grpc_address, connector=connector_address or "-"))
            self._links = tuple(RouterLink(address, identity, self) for address in self._config.router)
            running = [asyncio.create_task(link.run()) for link in self._links]
            following = asyncio.create_task(self._follow_health(server))
            await self._serve_until_stopped(identity)
            following.cancel()
            await server.drain()
            await self._drain()
        finally:
            await asyncio.gather(*(link.stop(task) for link, task in zip(self._links, running, strict=True)))
            self._intake.close()
            await asyncio.to_thread(self._engine.stop, CLOSE_TIMEOUT_S)
            await server.stop()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
        return 1 if self._died else 0

    def _build(self, info: ModelInfo, runner: "ModelRunner", cluster_secret: str) -> tuple[NodeCore, str]:
        return self._role.build(
            NodeParts(
                info=info,
                executor=runner,
                epoch=self._epoch,
                name=self._name,
                cluster_secret=cluster_secret,
                advertise=self._config.advertise or self._config.bind,
                clock=MonotonicClock(),
                wake=self._engine.wake,
                on_report=self._on_report_from_engine,
            )
        )

    def _identify(
        self, info: ModelInfo, runner: "ModelRunner", cluster_secret: str, grpc_port: int, connector_address: str
    ) -> NodeIdentity:
        config = self._config
        return NodeIdentity(
            role=self._role.name,
            epoch=self._epoch,
            name=self._name,
            version=__version__,
            model=info.name,
            model_fingerprint=info.fingerprint,
            quantization=config.quantization,
            device=config.device,
            kernels=runner.kernels_name,
            vocab_size=info.vocab_size,
            kv_layout=runner.layout,
            max_model_len=min(runner.max_model_len, runner.num_blocks * runner.layout.block_size),
            num_blocks=runner.num_blocks,
            max_num_seqs=config.max_num_seqs,
            grpc_address=f"{config.advertise or config.bind}:{grpc_port}",
            connector_address=connector_address,
            cluster_secret=cluster_secret,
        )

    async def _serve_until_stopped(self, identity: NodeIdentity) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        joined = [asyncio.create_task(link.registered.wait()) for link in self._links]
        await asyncio.wait([stopping, *joined], return_when=asyncio.FIRST_COMPLETED)
        for task in joined:
            task.cancel()
        process.settle_memory()
        if not self._stop.is_set():
            process.announce_ready(
                role=self._role.name, grpc=identity.grpc_address, connector=identity.connector_address
            )
        await stopping

    async def _follow_health(self, server: NodeServer) -> None:
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await server.set_healthy(self._snapshot.is_healthy)

    async def _drain(self) -> None:
        """Take nothing new; let what runs here end, and its KV be delivered."""
        log.info("draining", extra=fields(num_live=self._snapshot.num_live))
        for link in self._links:
            link.send_draining()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                while (self._snapshot.num_live or self._intake.num_compiling) and not self._died:
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            log.warning("drain_timed_out", extra=fields(num_live=self._snapshot.num_live))

    # --- from the engine thread

    def _on_report_from_engine(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None) -> None:
        self._loop.call_soon_threadsafe(self._on_report, deltas, snapshot, change)

    def _on_engine_death(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._die)

    def _die(self) -> None:
        self._died = True
        self._stop.set()
        self._reported.set()

    def _on_report(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None) -> None:
        if snapshot.is_healthy != self._snapshot.is_healthy:
            self._health_changed.set()
        self._snapshot = snapshot
        if change is not None:
            self._found_blocks.apply(change)
        self._reported.set()
        for link in self._links:
            link.send_step(tuple(delta for delta in deltas if link.owns(delta.key)), snapshot, change)
        self._trace(deltas)

    def _say(self, delta: Delta) -> None:
        """What is said of a leg that the engine has not heard of."""
        for link in self._links:
            if link.owns(delta.key):
                link.send_step((delta,), self._snapshot)
        self._reported.set()
        self._trace((delta,))

    def _trace(self, deltas: tuple[Delta, ...]) -> None:
        if self._traces is not None:
            now = self._clock.now()
            for delta in deltas:
                self._traces.hear(delta, now)

    # --- LinkEvents

    def on_start(self, start: Start) -> None:
        self._intake.start(start)
        if self._traces is not None:
            self._traces.start(start, start.request.arrival)

    def on_cancel(self, key: RequestKey, choice: int | None = None) -> None:
        self._quietly(partial(self._intake.cancel, key, choice))
        if self._traces is not None and choice is None:
            self._traces.cancel(key, self._clock.now())

    def on_peers(self, link: RouterLink, peers: tuple[Peer, ...]) -> None:
        self._peers[link.address] = peers
        every = {peer.epoch: peer for known in self._peers.values() for peer in known}
        self._quietly(lambda: self._engine.post(lambda: self._core.set_peers(every.values())))

    def on_drain(self) -> None:
        self._stop.set()

    def now(self) -> float:
        return self._clock.now()

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def whole_cache(self) -> CacheChange:
        return self._found_blocks.whole()

    def statistics(self) -> Snapshot:
        """Transfers go on while the engine idles."""
        return replace(self._snapshot, transfers=self._core.transfer_statistics())

    def _quietly(self, post: Callable[[], None]) -> None:
        """Post what has nobody to answer to. A full inbox means an engine that has stood still for long."""
        try:
            post()
        except KvrelayError:
            log.exception("inbox_full")
