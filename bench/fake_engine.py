"""A prefill and a decode node that compute nothing: they speak the nodes' real protocol, through the nodes' own link.

Every choice gets the same tokens over and over, one a step, and a step takes `step_s`. So what a router costs can be
measured where it is the only one that works.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay import __version__
from kvrelay.connector.base import ConnectorStatistics
from kvrelay.engine import secret
from kvrelay.engine.block_pool import BlockCounts
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Delta, Leg, LegReport, Load, Peer
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.request import FinishReason, Request, RequestKey
from kvrelay.node.link import NodeIdentity, RouterLink
from kvrelay.node.report import Snapshot, Start

NUM_BLOCKS = 1_000_000


@dataclass(slots=True)
class _Running:
    """One request that is being answered."""

    request: Request
    num_said: int = 0


class FakeNode:
    """One node, for one router. Belongs to the event loop."""

    def __init__(self, role: str, router: str, info: ModelInfo, token_ids: Sequence[int], step_s: float) -> None:
        """`token_ids`: what every choice says, over and over."""
        self.epoch = secret.new_epoch()
        self._clock = MonotonicClock()
        self._token_ids = token_ids
        self._step_s = step_s
        self._peers: frozenset[str] = frozenset()
        self._running: dict[RequestKey, _Running] = {}
        self._is_busy = asyncio.Event()
        identity = NodeIdentity(
            role=role,
            epoch=self.epoch,
            name=f"fake-{role}",
            version=__version__,
            model=info.name,
            model_fingerprint=info.fingerprint,
            quantization="none",
            device="none",
            kernels="none",
            vocab_size=info.vocab_size,
            kv_layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
            max_model_len=info.max_model_len,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=16_384,
            grpc_address="127.0.0.1:1",
            connector_address="127.0.0.1:1" if role == "decode" else "",
            cluster_secret="",
        )
        self.link = RouterLink(router, identity, self)

    async def serve(self) -> None:
        """Answer whatever the router asks for, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run())
            group.create_task(self._step_on())

    # --- what the link asks of a node

    def on_start(self, start: Start) -> None:
        if start.leg is Leg.PREFILL:
            self._say_first(start.request)
        else:
            self._running[start.request.key] = _Running(start.request)
            self._is_busy.set()

    def on_cancel(self, key: RequestKey, choice: int | None = None) -> None:
        if choice is None:
            self._running.pop(key, None)

    def on_peers(self, link: RouterLink, peers: tuple[Peer, ...]) -> None:
        self._peers = frozenset(peer.epoch for peer in peers)
        link.send_step((), self.snapshot())

    def on_drain(self) -> None:
        pass

    def now(self) -> float:
        return self._clock.now()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            blocks=BlockCounts(total=NUM_BLOCKS, free=NUM_BLOCKS, cached=0, owned=0, quarantined=0),
            load=Load(num_free_blocks=NUM_BLOCKS, num_running=len(self._running), sessions=self._peers),
            transfers=ConnectorStatistics(states={}, sessions={}),
        )

    def statistics(self) -> Snapshot:
        return self.snapshot()

    def whole_cache(self) -> CacheChange:
        return CacheChange(from_nothing=True)

    # --- what it says

    def _say_first(self, request: Request) -> None:
        """A prefill node's only word."""
        first = [
            Delta(key=request.key, choice=choice, token_ids=(self._token_ids[0],), report=LegReport())
            for choice in range(request.sampling.n)
        ]
        self.link.send_step((*first, Delta(key=request.key, ended=True)), self.snapshot())

    async def _step_on(self) -> None:
        """A step each `step_s` while anything runs, and one message a step."""
        due = self.now()
        while True:
            if not self._running:
                self._is_busy.clear()
                await self._is_busy.wait()
                due = self.now()
            due += self._step_s
            await asyncio.sleep(max(0.0, due - self.now()))
            self.link.send_step(self._step(), self.snapshot())

    def _step(self) -> tuple[Delta, ...]:
        deltas = list(itertools.chain.from_iterable(map(self._advance, self._running.values())))
        for delta in deltas:
            if delta.ended:
                del self._running[delta.key]
        return tuple(deltas)

    def _advance(self, running: _Running) -> list[Delta]:
        request, position = running.request, running.num_said
        running.num_said += 1
        is_last = running.num_said == request.sampling.max_tokens
        token_ids = (self._token_ids[position % len(self._token_ids)],)
        deltas = [
            Delta(
                key=request.key,
                choice=choice,
                first_token_index=position,
                token_ids=token_ids,
                finish_reason=FinishReason.LENGTH if is_last else None,
                report=LegReport() if position == 0 else None,
            )
            for choice in range(request.sampling.n)
        ]
        return [*deltas, Delta(key=request.key, ended=True)] if is_last else deltas
