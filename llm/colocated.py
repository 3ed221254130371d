"""A router's service and one node in this process, without sockets: what `kvrelay up --prefill 0` is made of.

Nothing here knows how to validate, tokenise, schedule, sample or detokenise: the router's service and a decode node's
core do, as they do when they are processes. In between stands no wire, only the event loop and the engine's inbox.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from kvrelay import __version__
from kvrelay.connector.base import (
    CancelOutcome,
    ConnectorStatistics,
    Expectation,
    GrantPlan,
    RefuseReason,
    TransferEvent,
)
from kvrelay.decode_node.node import DecodeNode
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.errors import Internal, KvrelayError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Delta
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.request import Request, RequestKey
from kvrelay.engine.secret import new_epoch
from kvrelay.engine.structured_output import FormCompiler
from kvrelay.node import report
from kvrelay.node.engine_thread import EngineThread
from kvrelay.node.intake import Intake
from kvrelay.node.report import Snapshot
from kvrelay.router.api import Output, RawRequest
from kvrelay.router.config import RouterConfig
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.messages import Cancel, NodeFacts, Role, Start, ToNode
from kvrelay.router.registry import Registry
from kvrelay.router.service import InferenceService
from kvrelay.router.tokenizer import Tokenizer

_NO_LIMIT_S = float("inf")  # a long list is no late request
_CLOSE_TIMEOUT_S = 60.0  # of the step that the engine is in


class NoPeers:
    """A KVReceiver that nobody dials: every request here is a whole leg."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def expect(self, expectation: Expectation) -> None:
        raise AssertionError(f"{expectation.key}: no other node computes for this one")

    def grant(self, key: RequestKey, plan: GrantPlan) -> None:
        raise AssertionError(f"{key}: nobody has offered")

    def refuse(self, key: RequestKey, reason: RefuseReason) -> None:
        raise AssertionError(f"{key}: nobody has offered")

    def cancel(self, key: RequestKey) -> CancelOutcome:
        return CancelOutcome.UNKNOWN

    def events(self) -> list[TransferEvent]:
        return []

    def describe(self) -> KVLayout:
        return self._layout

    def address(self) -> str:
        return ""

    def statistics(self) -> ConnectorStatistics:
        return ConnectorStatistics(states={}, sessions={})

    def close(self) -> None:
        """Nothing to end."""


class Colocated:
    """The service, and the node that it places everything on. Belongs to one event loop, where nothing else is said."""

    def __init__(self, config: EngineConfig, info: ModelInfo, runner: ModelRunner) -> None:
        """Raises: ModelError for a tokenizer that cannot be read."""
        self._clock = clock = MonotonicClock()
        self.num_seats = config.max_num_seqs
        self._epoch = new_epoch()
        self._registry = Registry(max_nodes=1)
        self._registry.add(_facts(config, info, runner, self._epoch))
        tokenizer = Tokenizer.load(info)
        self._dispatcher = Dispatcher(self._registry, self, tokenizer, clock)
        limits = RouterConfig(model=config.model, default_timeout_s=_NO_LIMIT_S, max_timeout_s=_NO_LIMIT_S)
        self.service = InferenceService(
            limits, info, tokenizer, self._registry, self._dispatcher, epoch=new_epoch(), clock=clock
        )
        pool = BlockPool(runner.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self._scheduler = DecodeScheduler(config, pool, num_host_blocks=runner.num_host_blocks)
        engine = Engine(self._scheduler, runner, info.eos_token_ids, clock)
        receiver = NoPeers(runner.layout)
        self._core = DecodeNode(engine, self._scheduler, receiver, clock, self._say, vocab_size=info.vocab_size)
        self._snapshot = self._core.snapshot()
        self._engine = EngineThread(self._say_death, config.nice)
        self._intake = Intake(self._core, self._engine, FormCompiler(info), self._answer)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Colocated"]:
        """From the engine thread's first turn to its last."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._core)
        try:
            yield self
        finally:
            self._intake.close()
            # Not on another thread: none can be started when the interpreter is about to end.
            self._engine.stop(_CLOSE_TIMEOUT_S)

    async def prepare(self, raw: RawRequest) -> Request:
        """Check and tokenise, and see that it can ever run.

        Raises: InvalidArgument, NotFound.
        """
        request = await self.service.prepare(raw, None)
        self._scheduler.check_fits(request)  # asks nothing that the engine thread changes
        return request

    async def run(self, raw: RawRequest, request: Request) -> Sequence[Output]:
        """Each choice in one piece, in the order in which they ended. Raises: KvrelayError."""
        async with aclosing(self.generate(raw, request)) as outputs:
            return [output async for output in outputs]

    def generate(self, raw: RawRequest, request: Request) -> AsyncGenerator[Output]:
        """As the service does. To be closed (`aclosing`), whatever happens."""
        return self.service.generate(raw, request, on_output=_nothing)

    def statistics(self) -> Snapshot:
        """As of the engine's last report. Any thread."""
        return self._snapshot

    # --- the way to the node

    def send(self, epoch: str, message: ToNode) -> None:
        """The dispatcher's word to its node."""
        if isinstance(message, Start):
            request = replace(message.request, arrival=self._clock.now())
            self._intake.start(report.Start(message.leg, request))
        elif isinstance(message, Cancel):
            self._intake.cancel(message.key, message.choice)

    # --- the way back, from the engine thread

    def _say(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None) -> None:
        # What the cache holds interests who chooses between nodes.
        self._loop.call_soon_threadsafe(self._hear, deltas, snapshot)

    def _say_death(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._lose_node, Internal(f"the engine thread died: {error!r}"))

    def _hear(self, deltas: tuple[Delta, ...], snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._registry.report(self._epoch, snapshot.load)
        for delta in deltas:
            self._answer(delta)

    def _answer(self, delta: Delta) -> None:
        self._dispatcher.deliver(self._epoch, delta)

    def _lose_node(self, error: KvrelayError) -> None:
        self._registry.remove(self._epoch)
        self._dispatcher.lose_node(self._epoch, error)


def _facts(config: EngineConfig, info: ModelInfo, runner: ModelRunner, epoch: str) -> NodeFacts:
    return NodeFacts(
        role=Role.DECODE,
        epoch=epoch,
        name="llm",
        version=__version__,
        model_fingerprint=info.fingerprint,
        quantization=config.quantization,
        kv_layout=runner.layout,
        max_model_len=min(runner.max_model_len, runner.num_blocks * runner.layout.block_size),
        num_blocks=runner.num_blocks,
        max_num_seqs=config.max_num_seqs,
        grpc_address="",
    )


def _nothing() -> None:
    """Nobody waits at a door here."""
