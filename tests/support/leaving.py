"""Clients that leave in every way there is, clients that stay, and a router with its pair seen from outside.

All of it speaks gRPC to real processes. What is known of a moment is what the router and the nodes say of themselves.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from support.roles import RoleProcess

from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc, node_pb2, node_pb2_grpc

WAIT_S = 10.0
BACK_S = 4.5  # what was left comes back within a second; leases and timers, a backstop, would do it after five
_LOOK_EVERY_S = 0.005


class Way(StrEnum):
    """How a client leaves."""

    CANCEL = "cancel"  # the call is cancelled
    CLOSE = "close"  # the channel is closed
    CUT = "cut"  # the connection ends without a word, as when the client's process dies
    DEADLINE = "deadline"  # gRPC's own runs out
    TIMEOUT_S = "timeout_s"  # the request's own runs out

    @property
    def by_clock(self) -> bool:
        return self in (Way.DEADLINE, Way.TIMEOUT_S)

    @property
    def code(self) -> grpc.StatusCode:
        """What the client itself sees."""
        if self.by_clock:
            return grpc.StatusCode.DEADLINE_EXCEEDED
        return grpc.StatusCode.UNAVAILABLE if self is Way.CUT else grpc.StatusCode.CANCELLED


class Missed(Exception):
    """Somebody left before the moment was seen, or after it: the machine is not as fast as its clock was set for."""


def make_request(
    prompt: Sequence[int] | str, *, stream: bool = True, priority: int = 0, **sampling: Any
) -> pb.GenerateRequest:
    """Greedy and past any EOS, unless told otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True} | sampling
    request = pb.GenerateRequest(sampling=pb.SamplingParams(**params), priority=priority)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if not stream:
        request.stream = False
    return request


# --- clients ------------------------------------------------------------------------------------------------------


class Wire:
    """A client's connection through a forwarder of its own, so that it can break."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_bytes_up = 0

    async def open(self) -> str:
        """Returns: the address to dial."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """As a kernel does for a process that is gone; nobody says goodbye, and nobody can come back."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._server.wait_closed()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink, is_up=sink is up_writer))
            self._pumps.add(pump)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                sink.write(data)
                await sink.drain()
                self.num_bytes_up += len(data) * is_up
        sink.close()


class Call:
    """One Generate call, read to its end. `tokens` are its first choice's."""

    def __init__(self, channel: grpc.aio.Channel, request: pb.GenerateRequest, timeout: float | None = None) -> None:
        self.tokens: list[int] = []
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.on_tokens: Callable[[int], None] = lambda count: None
        self._changed = asyncio.Condition()
        self._call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout)
        self._reading = asyncio.create_task(self._read())

    @property
    def is_over(self) -> bool:
        return self.code is not None

    async def ended(self) -> grpc.StatusCode:
        await asyncio.shield(self._reading)
        assert self.code is not None
        return self.code

    async def has_tokens(self, count: int) -> None:
        """Raises: Missed if it ends with fewer."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.tokens) >= count or self.is_over)
        if len(self.tokens) < count:
            raise Missed(f"{len(self.tokens)} tokens, and the end: {self.code} {self.details}")

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                await self._take(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if not self._call.done():
                raise  # the test itself is being cancelled
        finally:
            self.cancel()  # nobody reads on; no more than a word if it has ended
            self.details = await self._call.details() or ""
            self.code = await self._call.code()
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, response: pb.GenerateResponse) -> None:
        if response.choice == 0:
            assert response.first_token_index == len(self.tokens)
            self.tokens += response.token_ids
            self.on_tokens(len(response.token_ids))
            async with self._changed:
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Line:
    """A client's own connection to the router."""

    wire: Wire
    channel: grpc.aio.Channel

    async def close(self) -> None:
        await self.channel.close()
        await self.wire.close()


class Leaver(Call):
    """A call on a line of its own, by a client that will not wait for the end."""

    def __init__(self, way: Way, line: Line, request: pb.GenerateRequest, after_s: float) -> None:
        self.way = way
        self.line = line
        self.is_streamed = request.stream or not request.HasField("stream")
        if way is Way.TIMEOUT_S:
            request.timeout_s = after_s
        super().__init__(line.channel, request, after_s if way is Way.DEADLINE else None)

    async def leave(self) -> grpc.StatusCode:
        """Go, or let the clock run out. Returns: how the call ended for the client."""
        match self.way:
            case Way.CANCEL:
                self.cancel()
            case Way.CLOSE:
                await self.line.channel.close()
            case Way.CUT:
                self.line.wire.cut()
        return await self.ended()

    async def close(self) -> None:
        self.cancel()
        await self.ended()
        await self.line.close()


@contextlib.asynccontextmanager
async def closing_all() -> AsyncIterator[list[Leaver]]:
    """A list of calls of which none is left afterwards, whatever happens."""
    calls: list[Leaver] = []
    try:
        yield calls
    finally:
        await asyncio.gather(*(call.close() for call in calls))


# --- the processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """What the router and both nodes say; of a frozen one, what it said last."""

    num_requests: int
    prefill: node_pb2.NodeStats
    decode: node_pb2.NodeStats


@dataclass(frozen=True, slots=True)
class Standing:
    """Requests that stay, each with one block: so many on D, and so many more whose KV waits on P for D's room."""

    num_landed: int = 0
    num_offered: int = 0

    def is_all(self, view: View) -> bool:
        """Whether nobody else has left anything anywhere."""
        return self.is_all_of_router(view) and self.is_all_of_p(view) and self.is_all_of_d(view)

    def is_all_of_router(self, view: View) -> bool:
        return view.num_requests == self.num_landed + self.num_offered

    def is_all_of_p(self, view: View) -> bool:
        load, blocks, transfers = view.prefill.load, view.prefill.blocks, view.prefill.transfers
        return (
            load.num_running == load.num_waiting == load.num_waiting_tokens == 0
            and blocks.owned == self.num_offered == blocks.total - blocks.free - blocks.cached
            and dict(transfers.states) == _states(OFFERED=self.num_offered)
        )

    def is_all_of_d(self, view: View) -> bool:
        load, blocks, transfers = view.decode.load, view.decode.blocks, view.decode.transfers
        return (
            (load.num_running, load.num_waiting) == (self.num_landed, self.num_offered)
            and blocks.owned == self.num_landed == blocks.total - blocks.free - blocks.cached
            and dict(transfers.states) == _states(PENDING=self.num_offered)
        )


def _states(**counts: int) -> dict[str, int]:
    return {state: count for state, count in counts.items() if count}


class Cluster:
    """A router, a prefill node and a decode node; to be used on one event loop."""

    def __init__(self, router: RoleProcess, prefill: RoleProcess, decode: RoleProcess) -> None:
        self._processes = {"router": router, "prefill": prefill, "decode": decode}
        self._channels = {name: grpc.aio.insecure_channel(role.grpc) for name, role in self._processes.items()}
        self.channel = self._channels["router"]
        cluster = node_pb2_grpc.ClusterStub(self.channel)
        nodes = {name: node_pb2_grpc.NodeStub(self._channels[name]) for name in ("prefill", "decode")}
        self._ask: dict[str, Callable[[], Awaitable[Any]]] = {
            "router": lambda: cluster.GetCluster(node_pb2.GetClusterRequest(), timeout=WAIT_S),
            "prefill": lambda: nodes["prefill"].Stats(node_pb2.StatsRequest(), timeout=WAIT_S),
            "decode": lambda: nodes["decode"].Stats(node_pb2.StatsRequest(), timeout=WAIT_S),
        }
        self._frozen: set[str] = set()
        self._said: dict[str, Any] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop a process in whatever it does; what is sent to it waits in its sockets. For less than a lease."""
        pid = self._processes[name].process.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        self._frozen.add(name)
        try:
            yield
        finally:
            self._frozen.discard(name)
            os.kill(pid, signal.SIGCONT)

    async def view(self) -> View:
        names = [name for name in self._ask if name not in self._frozen]
        self._said.update(zip(names, await asyncio.gather(*(self._ask[name]() for name in names)), strict=True))
        return View(self._said["router"].num_requests, self._said["prefill"], self._said["decode"])

    async def until(
        self, condition: Callable[[View], bool], watched: Iterable[Call] = (), *, within_s: float = WAIT_S
    ) -> View:
        """Look until a condition holds.

        Raises: Missed if one of the calls that are needed for it ends before; AssertionError when the time is up.
        """
        watched = list(watched)
        give_up_at = time.monotonic() + within_s
        while not condition(view := await self.view()):
            if over := [f"{call.code} {call.details}" for call in watched if call.is_over]:
                raise Missed(", ".join(over))
            assert time.monotonic() < give_up_at, f"it did not come to be:\n{view}"
            await asyncio.sleep(_LOOK_EVERY_S)
        return view

    async def dial(self) -> Line:
        """A connection that stands."""
        wire = Wire(self._processes["router"].grpc)
        # gRPC would let channels to one address share a connection.
        channel = grpc.aio.insecure_channel(await wire.open(), options=[("grpc.use_local_subchannel_pool", 1)])
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        return Line(wire, channel)
