"""Real nodes in this process, each with its engine thread, connector and links, on the event loop of the test: what a
test may ask of them while a router in this process (`router_harness`) serves over them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from support.oracle import engine_config
from support.router_harness import Harness, wait_until

from kvrelay.decode_node import main as decode_main
from kvrelay.decode_node.config import DecodeConfig
from kvrelay.engine.block_hash import short_name
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.secret import new_epoch
from kvrelay.node.core import NodeCore
from kvrelay.node.main import Role, _NodeProcess
from kvrelay.node.report import Snapshot
from kvrelay.prefill_node import main as prefill_main
from kvrelay.prefill_node.config import PrefillConfig
from kvrelay.router.registry import Node

WAIT_S = 60.0


class ServedNode:
    """One node, from `serving` to its end."""

    def __init__(self, role: str, model: Path, info: ModelInfo, name: str, routers: Sequence[str], **more: Any) -> None:
        self.name, self.epoch = name, new_epoch()
        self._info = info
        shared = vars(engine_config(model, max_num_batched_tokens=32, **more))
        if role == "prefill":
            prefill = PrefillConfig(**shared, router=tuple(routers))
            self._role = Role(role, lambda parts: prefill_main._build(prefill, parts))
            self._process = _NodeProcess(prefill, self._role, self.epoch, name)
            self._runner = ModelRunner.load(info, prefill)
        else:
            decode = DecodeConfig(**shared, router=tuple(routers))
            self._role = Role(role, lambda parts: decode_main._build(decode, parts))
            self._process = _NodeProcess(decode, self._role, self.epoch, name)
            self._runner = ModelRunner.load(info, decode)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["ServedNode"]:
        """Registered with every router that is there; drained at the end."""
        task = asyncio.create_task(self._process.serve(self._info, self._runner, ""))
        try:
            await wait_until(lambda: any(link.registered.is_set() for link in self._process._links))
            yield self
        finally:
            self._process.on_drain()
            async with asyncio.timeout(WAIT_S):
                assert await task == 0
            self._runner.close()

    @property
    def core(self) -> NodeCore:
        return self._process._core

    @property
    def pool(self) -> BlockPool:
        return self.core.engine.scheduler.pool

    @property
    def snapshot(self) -> Snapshot:
        """As of its last report."""
        return self._process.snapshot()

    @property
    def found_names(self) -> frozenset[int]:
        """Of all that its prefix cache holds. While it computes nothing."""
        return frozenset(map(short_name, self.pool.found_hashes()))

    @contextlib.contextmanager
    def standing_still(self) -> Any:
        """Its engine thread takes no turn meanwhile; everything else of it goes on."""
        go_on = threading.Event()
        self._process._engine.post(lambda: go_on.wait(WAIT_S))
        try:
            yield
        finally:
            go_on.set()


class Cluster:
    """A router and real nodes around it."""

    def __init__(self, router: Harness, prefills: Sequence[ServedNode], decodes: Sequence[ServedNode]) -> None:
        self.router, self.prefills, self.decodes = router, prefills, decodes

    @property
    def nodes(self) -> list[ServedNode]:
        return [*self.prefills, *self.decodes]

    def seen(self, node: ServedNode) -> Node:
        """A node as the router sees it."""
        return next(seen for seen in self.router.server.registry if seen.facts.epoch == node.epoch)

    async def quiet(self) -> None:
        """Until every node is there, all pairs have sessions, nothing runs, and the router has heard all of it."""
        epochs = {node.epoch for node in self.nodes}
        decodes = {node.epoch for node in self.decodes}
        await wait_until(lambda: epochs == {seen.facts.epoch for seen in self.router.server.registry}, WAIT_S)
        await wait_until(lambda: all(self.seen(node).load.sessions == decodes for node in self.prefills), WAIT_S)
        await wait_until(lambda: all(self._is_idle(node) for node in self.nodes), WAIT_S)

    def _is_idle(self, node: ServedNode) -> bool:
        seen = self.seen(node)
        return (
            (node.snapshot.num_live, seen.num_choices, seen.num_waiting_tokens) == (0, 0, 0)
            and node.snapshot.blocks.owned == 0
            and seen.prefixes.names == node.found_names
        )


@contextlib.asynccontextmanager
async def cluster(
    router: Harness,
    model: Path,
    info: ModelInfo,
    *,
    prefill: int = 1,
    decode: int = 1,
    routers: Sequence[str] = (),
    **config: Any,
) -> AsyncIterator[Cluster]:
    """Nodes of `router`, and of `routers` beside it, quiet at the beginning and at the end."""
    addresses = (router.address, *routers)
    async with contextlib.AsyncExitStack() as stack:
        nodes: dict[str, list[ServedNode]] = {"prefill": [], "decode": []}
        for role, count in (("decode", decode), ("prefill", prefill)):
            for i in range(count):
                node = ServedNode(role, model, info, f"{role}-{i}", addresses, **config)
                nodes[role].append(await stack.enter_async_context(node.serving()))
        running = Cluster(router, nodes["prefill"], nodes["decode"])
        await running.quiet()
        yield running
