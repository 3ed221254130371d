"""The nodes' streams: registration, lease and load report up; peers, starts and cancels down.

A stream is a node's life on this router: when it ends, for whatever reason, the node is lost and every leg on it fails.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from kvrelay import __version__
from kvrelay.engine import secret
from kvrelay.engine.clock import Clock
from kvrelay.engine.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KvrelayError,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
)
from kvrelay.engine.legs import Delta
from kvrelay.engine.log import fields, get_logger
from kvrelay.engine.model_info import ModelInfo
from kvrelay.proto import node_pb2, node_pb2_grpc
from kvrelay.router import cluster_wire, node_wire
from kvrelay.router.answer import Context, answering
from kvrelay.router.links import Link, Links
from kvrelay.router.messages import NodeFacts, Peers, Role
from kvrelay.router.registry import Registry

log = get_logger(__name__)

Messages = AsyncIterator[node_pb2.NodeMessage]


class Legs(Protocol):
    """Who wants to know what the nodes say of requests."""

    def deliver(self, epoch: str, delta: Delta) -> None: ...

    def lose_node(self, epoch: str, error: KvrelayError) -> None: ...


class NodesServicer(node_pb2_grpc.NodesServicer):
    """Serves every node's stream: one task reads, one writes what its link queues."""

    def __init__(
        self,
        registry: Registry,
        links: Links,
        legs: Legs,
        info: ModelInfo,
        *,
        router_epoch: str,
        cluster_secret: str,
        lease_s: float,
        max_backlog: int,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change`: called after each change of which nodes there are and whether they take requests."""
        self._registry = registry
        self._links = links
        self._legs = legs
        self._info = info
        self._router_epoch = router_epoch
        self._cluster_secret = cluster_secret
        self._lease_s = lease_s
        self._max_backlog = max_backlog
        self._clock = clock
        self._on_change = on_change

    async def Connect(self, request_iterator: Messages, context: Context) -> None:  # noqa: N802  gRPC's name
        """A node's stream, from its registration to its loss."""
        async with answering(context):
            facts = await self._register(request_iterator, context)
            link = Link(self._max_backlog)
            self._join(facts, link)
            error: KvrelayError | None = Unavailable("its stream broke")
            try:
                error = await self._converse(facts.epoch, link, request_iterator, context)
            finally:
                self._leave(facts, link, error)
            if error is not None:
                raise error

    # --- registration

    async def _register(self, messages: Messages, context: Context) -> NodeFacts:
        """Challenge, hear and check the node, prove the secret in turn.

        Raises: Unauthenticated before anything else is told; InvalidArgument, PreconditionFailed, DeadlineExceeded.
        """
        challenge = secret.new_nonce()
        try:
            async with asyncio.timeout(self._lease_s):
                await context.write(node_wire.write_challenge(challenge, self._router_epoch))
                message = (await anext(messages, node_pb2.NodeMessage())).register
        except TimeoutError:
            raise DeadlineExceeded(f"no Register within {self._lease_s:g} s") from None
        said = (challenge, message.nonce, message.epoch.encode())
        fresh = len(message.nonce) == secret.NONCE_BYTES
        if not fresh or not secret.verify(self._cluster_secret, message.proof, "node", *said):
            raise Unauthenticated("the node did not prove that it knows the cluster secret")
        facts = node_wire.read_register(message)
        self._check_fits(facts)
        await context.write(node_wire.write_registered(secret.prove(self._cluster_secret, "router", *said)))
        return facts

    def _check_fits(self, facts: NodeFacts) -> None:
        """Raises: PreconditionFailed, naming the first field that differs."""
        for field, ours, theirs in (
            ("version", __version__, facts.version),
            ("model_fingerprint", self._info.fingerprint, facts.model_fingerprint),
        ):
            if ours != theirs:
                raise PreconditionFailed(f"{field} differs: {ours!r} on the router, {theirs!r} on the node")
        self._registry.check_fits(facts)

    def _join(self, facts: NodeFacts, link: Link) -> None:
        """Raises: ResourceExhausted, PreconditionFailed."""
        replaced = self._registry.add(facts)
        if replaced is not None:
            reason = Unavailable(f"node {facts.name} registered anew")
            self._links[replaced].close(reason)
            self._links.remove(replaced, self._links[replaced])
            self._legs.lose_node(replaced, reason)
        self._links.add(facts.epoch, link)
        log.info("node_joined", extra=fields(role=facts.role, name=facts.name, epoch=facts.epoch))
        self._tell_peers()

    def _leave(self, facts: NodeFacts, link: Link, error: KvrelayError | None) -> None:
        reason = error.message if error else "it ended its stream"
        say = log.info if error is None else log.warning
        say("node_left", extra=fields(role=facts.role, name=facts.name, epoch=facts.epoch, reason=reason))
        if not self._links.remove(facts.epoch, link):
            return  # replaced: its legs are lost already
        self._registry.remove(facts.epoch)
        self._legs.lose_node(facts.epoch, Unavailable(f"{facts.role} node {facts.name} was lost: {reason}"))
        self._tell_peers()

    def _tell_peers(self) -> None:
        """Tell every prefill node which decode nodes there are, and the owner that something changed."""
        peers = Peers(self._registry.peers())
        for node in self._registry:
            if node.facts.role is Role.PREFILL:
                self._links.send(node.facts.epoch, peers)
        self._on_change()

    # --- the talk

    async def _converse(self, epoch: str, link: Link, messages: Messages, context: Context) -> KvrelayError | None:
        """Read and write until the link is closed. Returns: why."""
        async with asyncio.TaskGroup() as group:
            tasks = (
                group.create_task(self._read(epoch, link, messages)),
                group.create_task(_write(link, context)),
            )
            error = await link.wait_closed()
            for task in tasks:
                task.cancel()
        return error

    async def _read(self, epoch: str, link: Link, messages: Messages) -> None:
        """Serve what the node says, and keep its lease by it."""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._lease_s) as lease:
                async for message in messages:
                    lease.reschedule(now() + self._lease_s)
                    self._serve(epoch, message)
            link.close(None)
        except TimeoutError:
            link.close(Unavailable(f"it said nothing for {self._lease_s:g} s"))
        except DecodeError as error:
            link.close(InvalidArgument("message", "bytes", f"cannot be read: {error}"))
        except KvrelayError as error:
            link.close(error)

    def _serve(self, epoch: str, message: node_pb2.NodeMessage) -> None:
        match message.WhichOneof("message"):
            case "step":
                if message.step.HasField("load"):
                    self._registry.report(epoch, node_wire.read_load(message.step.load))
                if message.step.HasField("cache"):
                    self._registry.change_cache(epoch, node_wire.read_cache_change(message.step.cache))
                for delta in message.step.deltas:
                    self._legs.deliver(epoch, node_wire.read_delta(delta))
            case "load":
                self._registry.report(epoch, node_wire.read_load(message.load))
            case "stats":
                self._registry.report(epoch, node_wire.read_load(message.stats.load))
                self._registry.keep_statistics(epoch, cluster_wire.read_stats(message.stats), self._clock.now())
            case "draining":
                self._registry.drain(epoch)
                self._on_change()
            case other:
                raise InvalidArgument("message", other, "not expected from a registered node")


async def _write(link: Link, context: Context) -> None:
    try:
        while True:
            await context.write(node_wire.write_message(await link.queue.get()))
    except grpc.aio.InternalError:  # a write to a node that is gone
        link.close(Unavailable("its stream broke"))
