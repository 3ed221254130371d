"""A node that computes nothing: it speaks the node's side of the protocol over real gRPC, as a test tells it to.

It never speaks by itself but to register and to keep its lease; a test waits for what the router says (`next_start`,
`next_cancel`, `wait_peers`) and answers with `say`, or lets `serve` answer every start from a table.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvrelay import __version__
from kvrelay.engine import secret
from kvrelay.engine.model_info import ModelInfo
from kvrelay.proto import inference_pb2, node_pb2

PREFILL, DECODE = node_pb2.ROLE_PREFILL, node_pb2.ROLE_DECODE
HEARTBEAT_S = 1.0


class FakeNode:
    """One life of a node. `registration` overrides what it says of itself; `reads`: whether it hears what
    comes after it has registered."""

    def __init__(
        self,
        role: node_pb2.Role,
        info: ModelInfo,
        name: str,
        *,
        cluster_secret: str = "",
        reads: bool = True,
        **registration: Any,
    ) -> None:
        self.epoch = registration.pop("epoch", None) or secret.new_epoch()
        self.name = name
        self.role = role
        self.starts: asyncio.Queue[node_pb2.Start] = asyncio.Queue()
        self.cancels: asyncio.Queue[node_pb2.Cancel] = asyncio.Queue()
        self.peers: frozenset[str] = frozenset()
        self.load = node_pb2.Load(num_free_blocks=1000)
        self.ended = asyncio.Event()
        self._peers_changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._secret = cluster_secret
        self._reads = reads
        self._registration = {
            "version": __version__,
            "model": info.name,
            "model_fingerprint": info.fingerprint,
            "max_model_len": info.max_model_len,
            "num_blocks": 1000 + info.max_model_len // 16,
            "max_num_seqs": 64,
            "kv_layout": node_pb2.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
            "connector_address": "127.0.0.1:1" if role == DECODE else "",
        } | registration

    @contextlib.asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator["FakeNode"]:
        """Registered with the router at `address`; its stream is cut at the end, without a word."""
        # A node that does not read shall not have gRPC's growing windows read for it.
        options = [] if self._reads else [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await self._register(channel)
            tasks = [asyncio.create_task(self._keep_lease())]
            if self._reads:
                tasks.append(asyncio.create_task(self._listen()))
            try:
                yield self
            finally:
                self.die()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- what the router says

    async def next_start(self) -> node_pb2.Start:
        async with asyncio.timeout(10):
            return await self.starts.get()

    async def next_cancel(self) -> node_pb2.Cancel:
        async with asyncio.timeout(10):
            return await self.cancels.get()

    async def wait_peers(self, *epochs: str) -> None:
        """Until the router names exactly these decode nodes."""
        async with asyncio.timeout(10), self._peers_changed:
            await self._peers_changed.wait_for(lambda: self.peers == frozenset(epochs))

    # --- what the node says

    async def say(self, *deltas: node_pb2.Delta, load: node_pb2.Load | None = None) -> None:
        """One step's message."""
        await self.write(node_pb2.NodeMessage(step=node_pb2.Step(deltas=deltas, load=load)))

    async def say_load(self, **load: Any) -> None:
        """Report a load, and keep to it."""
        self.load = node_pb2.Load(**{"num_free_blocks": 1000} | load)
        await self.write(node_pb2.NodeMessage(load=self.load))

    async def say_draining(self) -> None:
        await self.write(node_pb2.NodeMessage(draining=node_pb2.Draining()))

    async def write(self, message: node_pb2.NodeMessage) -> None:
        await self.write_bytes(message.SerializeToString())

    async def write_bytes(self, message: bytes) -> None:
        async with self._writing:
            await self._stream.write(message)

    async def serve(self, output_of: Callable[[node_pb2.Start, int], Sequence[int]], *, per_step: int = 1) -> None:
        """Answer every start as a node would, each choice with the output that the table has for it: a prefill leg with
        the first tokens, others with all of them, `per_step` at a time, in steps that carry every running request's.
        Log-probabilities are `logprobs_of`'s. Until cancelled."""
        running: dict[str, _Leg] = {}
        while True:
            while not running or not self.starts.empty():
                start = await self.starts.get()
                outputs = {choice: output_of(start, choice) for choice in range(start.sampling.n)}
                running[start.request_id] = _Leg(start, outputs)
            while not self.cancels.empty():
                cancel = self.cancels.get_nowait()
                if cancel.request_id in running and cancel.HasField("choice"):
                    running[cancel.request_id].outputs.pop(cancel.choice, None)
                else:
                    running.pop(cancel.request_id, None)
            await self.say(*(said for leg in running.values() for said in leg.step(per_step)))
            running = {request_id: leg for request_id, leg in running.items() if leg.outputs}

    def die(self) -> None:
        """Cut the stream without a word."""
        self._stream.cancel()

    # --- the stream

    async def _register(self, channel: grpc.aio.Channel) -> None:
        self._stream = channel.stream_stream(
            "/kvrelay.v1.Nodes/Connect", response_deserializer=node_pb2.RouterMessage.FromString
        )()
        challenge = (await self._read()).challenge
        nonce = secret.new_nonce()
        said = (challenge.nonce, nonce, self.epoch.encode())
        self.registered_with = node_pb2.Register(
            role=self.role,
            epoch=self.epoch,
            name=self.name,
            nonce=nonce,
            proof=secret.prove(self._secret, "node", *said),
            **self._registration,
        )
        await self.write(node_pb2.NodeMessage(register=self.registered_with))
        registered = (await self._read()).registered
        assert secret.verify(self._secret, registered.proof, "router", *said)

    async def _read(self) -> node_pb2.RouterMessage:
        message = await self._stream.read()
        if not isinstance(message, node_pb2.RouterMessage):  # the end: its status is the error
            code, details = await self._stream.code(), await self._stream.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        return message

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._read()
                match message.WhichOneof("message"):
                    case "start":
                        self.starts.put_nowait(message.start)
                    case "cancel":
                        self.cancels.put_nowait(message.cancel)
                    case "peers":
                        async with self._peers_changed:
                            self.peers = frozenset(peer.epoch for peer in message.peers.decode_nodes)
                            self._peers_changed.notify_all()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended.set()

    async def _keep_lease(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.write(node_pb2.NodeMessage(load=self.load))
                await asyncio.sleep(HEARTBEAT_S)


@dataclass
class _Leg:
    """One request that a fake node serves, and what is left of its choices' outputs."""

    start: node_pb2.Start
    outputs: dict[int, Sequence[int]]
    num_said: int = 0

    def step(self, per_step: int) -> Iterator[node_pb2.Delta]:
        """The next tokens of every choice, and behind them the leg's end, if it is that."""
        start, is_prefill = self.start, self.start.leg == node_pb2.Start.LEG_PREFILL
        if self.num_said == 0 and start.leg != node_pb2.Start.LEG_DECODE:
            yield from prompt_deltas(start)
        end = 1 if is_prefill else self.num_said + per_step
        for choice, tokens in list(self.outputs.items()):
            finish = "length" if end >= len(tokens) else ""
            yield delta(start, tokens[self.num_said : end], first=self.num_said, choice=choice, finish=finish)
            if finish or is_prefill:
                del self.outputs[choice]
        self.num_said = end
        if not self.outputs:
            yield delta(start, ended=True)


def logprobs_of(token_ids: Sequence[int], num_likeliest: int) -> list[inference_pb2.Logprobs]:
    """Log-probabilities as fake nodes have them, exact in float32: a token's own, and those of the lowest ids."""
    return [
        inference_pb2.Logprobs(
            token_ids=[token_id, *range(num_likeliest)], logprobs=[-token_id / 8 - i for i in range(1 + num_likeliest)]
        )
        for token_id in token_ids
    ]


def prompt_deltas(start: node_pb2.Start) -> list[node_pb2.Delta]:
    """The prompt's log-probabilities where `start` asks for them, in two pieces."""
    if not start.sampling.HasField("prompt_logprobs"):
        return []
    entries = [
        inference_pb2.Logprobs(),
        *logprobs_of(start.prompt_token_ids[1:], start.sampling.prompt_logprobs),
    ]
    half = len(entries) // 2
    return [
        delta(start, prompt_logprobs=entries[:half]),
        delta(start, prompt_logprobs=entries[half:], first_prompt_index=half),
    ]


def delta(
    start: node_pb2.Start,
    tokens: Sequence[int] = (),
    *,
    first: int = 0,
    finish: str = "",
    ended: bool = False,
    **more: Any,
) -> node_pb2.Delta:
    """A node's word on the leg that `start` began, with log-probabilities where it asks for them."""
    asked = start.sampling.HasField("logprobs")
    return node_pb2.Delta(
        request_id=start.request_id,
        attempt=start.attempt,
        first_token_index=first,
        token_ids=tokens,
        logprobs=logprobs_of(tokens, start.sampling.logprobs) if asked else [],
        finish_reason=finish,
        ended=ended,
        **more,
    )
