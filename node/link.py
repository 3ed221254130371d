"""A node's stream to one router: registration, lease, load report, and the way of starts, cancels and tokens.

The node dials and dials again, with growing pauses, as long as it lives. When the stream ends, whatever that router
had asked for is cancelled: its clients are gone with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvrelay.engine import secret
from kvrelay.engine.errors import KvrelayError, Unauthenticated, Unavailable
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Delta, Peer
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.metrics import process_statistics
from kvrelay.engine.request import RequestKey
from kvrelay.node import wire
from kvrelay.node.report import Snapshot, Start
from kvrelay.proto import node_pb2, node_pb2_grpc

log = get_logger(__name__)

HEARTBEAT_S = 1.0
REGISTER_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 2.0
MAX_OUTBOX = 4096
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.enable_http_proxy", 0),
]

Stream = grpc.aio.StreamStreamCall[node_pb2.NodeMessage, node_pb2.RouterMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What a node says of itself when it registers."""

    role: str
    epoch: str
    name: str
    version: str
    model: str
    model_fingerprint: str
    quantization: str
    device: str
    kernels: str
    vocab_size: int
    kv_layout: KVLayout
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    grpc_address: str
    connector_address: str  # empty on prefill nodes
    cluster_secret: str


class LinkEvents(Protocol):
    """What a link asks of its node."""

    def on_start(self, start: Start) -> None:
        """Raises: KvrelayError if the node cannot take it in."""

    def on_cancel(self, key: RequestKey, choice: int | None = None) -> None: ...

    def on_peers(self, link: "RouterLink", peers: tuple[Peer, ...]) -> None: ...

    def on_drain(self) -> None: ...

    def now(self) -> float: ...

    def snapshot(self) -> Snapshot:
        """As of the last step."""

    def statistics(self) -> Snapshot:
        """The same, with what goes on without steps as it is now."""

    def whole_cache(self) -> CacheChange:
        """All that the prefix cache holds, as a change from nothing."""


class RouterLink:
    """One router. All methods belong to the event loop."""

    def __init__(self, address: str, identity: NodeIdentity, events: LinkEvents) -> None:
        self.address = address
        self.registered = asyncio.Event()
        self._identity = identity
        self._events = events
        self._outbox: asyncio.Queue[node_pb2.NodeMessage] = asyncio.Queue(MAX_OUTBOX)
        self._keys: set[RequestKey] = set()  # legs of this router that have not ended
        self._overflowed = asyncio.Event()
        self._stopped = False
        self._stream: Stream | None = None

    async def run(self) -> None:
        """Keep a stream open until `stop`."""
        pause_s = _MIN_PAUSE_S
        while not self._stopped:
            try:
                async with self._open_stream() as stream:
                    await self._register(stream)
                    pause_s = _MIN_PAUSE_S
                    await self._converse(stream)
            except (grpc.aio.AioRpcError, KvrelayError, TimeoutError) as error:
                detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                if not self._stopped:
                    reason = detail or type(error).__name__
                    log.warning("router_lost", extra=fields(router=self.address, reason=reason))
            except Exception:  # the root of a link: it fails this stream, and the next one is tried
                log.exception("link_failed", extra=fields(router=self.address))
            self._lose()
            if not self._stopped:
                await asyncio.sleep(pause_s)
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    async def stop(self, running: "asyncio.Task[None]") -> None:
        """Say what is still to be said, end the stream, and with it `running`, the task of `run`.

        A cancel alone could be lost: where it meets the stream's own end, the task group that both come to swallows it.
        """
        self._stopped = True
        if self.registered.is_set() and self._stream is not None:
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._outbox.join()
                    await self._stream.done_writing()
                    await asyncio.wait([running])  # the router ends the stream when it has read all
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def send_step(self, deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None = None) -> None:
        """Say what a step brought for this router's requests, and what it changed in the prefix cache."""
        for delta in deltas:
            if delta.ended:
                self._keys.discard(delta.key)
        for message in wire.write_step(deltas, snapshot, change):
            self._send(message)

    def send_draining(self) -> None:
        """Say that this node takes nothing new."""
        self._send(node_pb2.NodeMessage(draining=node_pb2.Draining()))

    def owns(self, key: RequestKey) -> bool:
        return key in self._keys

    # --- the stream

    @contextlib.asynccontextmanager
    async def _open_stream(self) -> AsyncIterator[Stream]:
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            stream: Stream = node_pb2_grpc.NodesStub(channel).Connect()
            self._stream = stream
            try:
                yield stream
            finally:
                self._stream = None
                stream.cancel()

    def _send(self, message: node_pb2.NodeMessage) -> None:
        """Queue a message; a router that does not read loses its stream, not the node its memory."""
        if not self.registered.is_set() or self._stopped:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed.set()

    async def _register(self, stream: Stream) -> None:
        """Answer the challenge, and see the router's own proof before anything else.

        Raises: Unauthenticated, Unavailable, TimeoutError, or the router's refusal as an AioRpcError.
        """
        mine = self._identity
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            challenge = (await self._read(stream)).challenge
            nonce = secret.new_nonce()
            said = (challenge.nonce, nonce, mine.epoch.encode())
            register = node_pb2.Register(
                role=wire.ROLES[mine.role],
                epoch=mine.epoch,
                name=mine.name,
                nonce=nonce,
                proof=secret.prove(mine.cluster_secret, "node", *said),
                version=mine.version,
                model=mine.model,
                model_fingerprint=mine.model_fingerprint,
                quantization=mine.quantization,
                device=mine.device,
                kernels=mine.kernels,
                kv_layout=wire.write_layout(mine.kv_layout),
                max_model_len=mine.max_model_len,
                grpc_address=mine.grpc_address,
                connector_address=mine.connector_address,
                num_blocks=mine.num_blocks,
                max_num_seqs=mine.max_num_seqs,
            )
            await _write(stream, node_pb2.NodeMessage(register=register))
            answer = await self._read(stream)
        if not secret.verify(mine.cluster_secret, answer.registered.proof, "router", *said):
            raise Unauthenticated(f"router {self.address} did not prove that it knows the cluster secret")
        self._outbox = asyncio.Queue(MAX_OUTBOX)
        self._overflowed.clear()
        self.registered.set()
        self.send_step((), self._events.snapshot(), self._events.whole_cache())
        self._send_statistics()
        log.info("router_joined", extra=fields(router=self.address, router_epoch=challenge.router_epoch))

    async def _converse(self, stream: Stream) -> None:
        """Read, write and keep the lease until one of them ends.

        Raises: Unavailable or AioRpcError, whichever ended it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_all(stream))
                group.create_task(self._write_all(stream))
                group.create_task(self._keep_lease())
                group.create_task(self._watch_overflow())
        except* (grpc.aio.AioRpcError, KvrelayError) as group_error:
            raise group_error.exceptions[0] from None

    async def _read(self, stream: Stream) -> node_pb2.RouterMessage:
        message = await stream.read()
        if not isinstance(message, node_pb2.RouterMessage):  # grpc.aio.EOF
            if await stream.code() is not grpc.StatusCode.OK:
                raise Unavailable(f"{(await stream.code()).name}: {await stream.details()}")
            raise Unavailable("the router ended the stream")
        return message

    async def _read_all(self, stream: Stream) -> None:
        while True:
            self._serve(await self._read(stream))

    async def _write_all(self, stream: Stream) -> None:
        while True:
            await _write(stream, await self._outbox.get())
            self._outbox.task_done()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._send_statistics()

    def _send_statistics(self) -> None:
        mine = self._identity
        stats = wire.write_stats(mine.role, mine.epoch, mine.name, self._events.statistics(), process_statistics())
        self._send(node_pb2.NodeMessage(stats=stats))

    async def _watch_overflow(self) -> None:
        await self._overflowed.wait()
        raise Unavailable(f"the router does not read: {MAX_OUTBOX} messages wait")

    # --- what the router says

    def _serve(self, message: node_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "start":
                self._serve_start(message.start)
            case "cancel":
                self._serve_cancel(message.cancel)
            case "peers":
                self._events.on_peers(self, wire.read_peers(message.peers))
            case "drain":
                self._events.on_drain()
            case other:
                log.warning("unexpected_message", extra=fields(router=self.address, message=other))

    def _serve_start(self, message: node_pb2.Start) -> None:
        key = RequestKey(message.request_id, message.attempt)
        self._keys.add(key)
        try:
            self._events.on_start(wire.read_start(message, self._events.now(), self._identity.vocab_size))
        except KvrelayError as error:
            self.send_step((Delta(key=key, error=error, ended=True),), self._events.snapshot())

    def _serve_cancel(self, message: node_pb2.Cancel) -> None:
        key = RequestKey(message.request_id, message.attempt)
        if key not in self._keys:
            return
        if message.HasField("choice"):
            self._events.on_cancel(key, message.choice)
        else:
            self._keys.discard(key)
            self._events.on_cancel(key)

    def _lose(self) -> None:
        self.registered.clear()
        keys, self._keys = self._keys, set()
        for key in keys:
            self._events.on_cancel(key)
        self._events.on_peers(self, ())


async def _write(stream: Stream, message: node_pb2.NodeMessage) -> None:
    """Raises: Unavailable, or AioRpcError, if the stream has ended."""
    try:
        await stream.write(message)
    except asyncio.InvalidStateError as error:  # gRPC's word for a stream that ended before the call
        raise Unavailable("the stream has ended") from error
