"""A TCP proxy on loopback that makes a link slow or breaks it: for measurements of slow links, and for tests.

It knows bytes and no protocol. All connections of one direction share one link: a rate, a delay, and at most one fault
at a place in the stream of bytes. `Proxy.heal` lets later connections through unharmed.
"""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

_CHUNK_BYTES = 65_536
_BUFFER_BYTES = 262_144  # of each socket's kernel buffers: what a link holds beside its delay
_TICK_S = 0.005  # the most that one write of a throttled link stands for
_BURST_S = 0.05  # lost to a late thread, and caught up
_CONNECT_S = 5.0


class Fault(Enum):
    """What happens at a place in the stream."""

    DROP = auto()  # a few bytes are missing
    DOUBLE = auto()  # a few bytes come twice
    REORDER = auto()  # two stretches change places
    CORRUPT = auto()  # one bit is another
    STALL = auto()  # nothing comes any more, nothing ends
    DIE = auto()  # both connections are reset


@dataclass(frozen=True, slots=True)
class Break:
    """One fault, `at` so many bytes into the link's stream, over `size` bytes."""

    fault: Fault
    at: int
    size: int = 1


class Breaker:
    """Applies one fault to a stream that comes in chunks. Pure, but for its own state."""

    def __init__(self, broken: Break | None) -> None:
        self._broken = broken
        self._num_seen = 0
        self._held = b""  # the stretch that a reorder keeps back
        self.has_struck = False

    def feed(self, data: bytes) -> tuple[bytes, Fault | None]:
        """What goes on, and STALL or DIE if that is the last of it."""
        broken, start = self._broken, self._num_seen
        self._num_seen += len(data)
        if broken is None or self._num_seen <= broken.at or start >= broken.at + broken.size:
            return self._release(data), None
        cut = max(0, broken.at - start)
        end = min(len(data), broken.at + broken.size - start)
        self.has_struck = True
        before, hit, after = data[:cut], data[cut:end], data[end:]
        match broken.fault:
            case Fault.DROP:
                return before + after, None
            case Fault.DOUBLE:
                return before + hit + hit + after, None
            case Fault.CORRUPT:
                return before + bytes([hit[0] ^ 0x10]) + hit[1:] + after, None
            case Fault.REORDER:
                self._held += hit
                return (before + self._release(after) if after else before), None
        return before, broken.fault

    def _release(self, data: bytes) -> bytes:
        """The held stretch goes behind the next as long as it."""
        if not self._held:
            return data
        size = len(self._held)
        held, self._held = self._held, b""
        return data[:size] + held + data[size:]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction: bytes a second (0: no limit), one way's delay, and what breaks."""

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    broken: Break | None = None


class _Direction:
    """What the connections of one direction share."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.breaker = Breaker(link.broken)
        self.num_bytes = 0
        self._free_at = 0.0

    @property
    def chunk_bytes(self) -> int:
        rate = self.link.bytes_per_s
        return max(1, min(_CHUNK_BYTES, int(rate * _TICK_S))) if rate else _CHUNK_BYTES

    def take(self, num_bytes: int) -> float:
        """The time at which the last of these bytes has left."""
        now = time.monotonic()
        if not self.link.bytes_per_s:
            return now
        self._free_at = max(self._free_at, now - _BURST_S) + num_bytes / self.link.bytes_per_s
        return self._free_at


class Proxy:
    """Listens on `host`:`port` (0: any free one) and connects each who comes to `upstream`. A thread of its own."""

    def __init__(
        self,
        upstream: tuple[str, int],
        *,
        forth: Link | None = None,
        back: Link | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`forth`: from who connects to `upstream`; `back`: the other way."""
        self._upstream = upstream
        self._directions = [_Direction(link or Link()) for link in (forth, back)]
        self._pairs: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((host, port))
        bound_host, bound_port = self._listener.getsockname()[:2]
        self.address = f"{bound_host}:{bound_port}"
        self._is_stalled = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """That went through, forth and back."""
        return self._directions[0].num_bytes, self._directions[1].num_bytes

    @property
    def has_struck(self) -> bool:
        return any(direction.breaker.has_struck for direction in self._directions)

    def heal(self) -> None:
        """No fault for connections that come from now on; those that stand are cut."""
        self._do(self._heal())

    def strike(self, broken: Break) -> None:
        """A fault on the way forth, its place counted from now on."""
        self._directions[0].breaker = Breaker(broken)

    def stall(self) -> None:
        """From now on nothing comes through, either way."""
        self._is_stalled = True

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- the thread

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._join(client))
            self._pairs.add(task)
            task.add_done_callback(self._pairs.discard)

    async def _heal(self) -> None:
        self._is_stalled = False
        self._directions = [_Direction(replace(d.link, broken=None)) for d in self._directions]
        await _cancel(self._pairs)

    async def _close(self) -> None:
        await _cancel([self._accepting, *self._pairs])
        self._listener.close()

    async def _join(self, client: socket.socket) -> None:
        """One connection and its other half, which end together, with a reset."""
        server = socket.socket()
        for socket_ in (client, server):
            socket_.setblocking(False)
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                socket_.setsockopt(socket.SOL_SOCKET, name, _BUFFER_BYTES)
        try:
            await asyncio.wait_for(self._loop.sock_connect(server, self._upstream), _CONNECT_S)
            forth, back = self._directions
            pumps = {
                self._loop.create_task(self._pump(client, server, forth)),
                self._loop.create_task(self._pump(server, client, back)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel(pumps)
        except OSError:
            pass  # nobody is there
        finally:
            client.close()
            server.close()

    async def _pump(self, source: socket.socket, target: socket.socket, direction: _Direction) -> None:
        """Until either end is gone, or the stream breaks."""
        on_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(0 if direction.link.delay_s else 1)
        delivering = self._loop.create_task(self._deliver(on_way, target, direction))
        try:
            while data := await self._loop.sock_recv(source, direction.chunk_bytes):
                if self._is_stalled:
                    await asyncio.Event().wait()  # until it is cut
                data, end = direction.breaker.feed(data)
                left_at = direction.take(len(data))
                await on_way.put((left_at + direction.link.delay_s, data))
                if end is Fault.DIE:
                    await on_way.join()
                    return
                if end is Fault.STALL:
                    await asyncio.Event().wait()  # until it is cut: that the source hangs up does not get through
                await asyncio.sleep(max(0.0, left_at - time.monotonic()))
            await on_way.join()
        except OSError:
            pass
        finally:
            await _cancel([delivering])

    async def _deliver(
        self, on_way: "asyncio.Queue[tuple[float, bytes]]", target: socket.socket, direction: _Direction
    ) -> None:
        while True:
            due, data = await on_way.get()
            if (pause_s := due - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
            try:
                await self._loop.sock_sendall(target, data)
                direction.num_bytes += len(data)
            except OSError:
                pass  # the target is gone: its own pump says so
            on_way.task_done()


async def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
