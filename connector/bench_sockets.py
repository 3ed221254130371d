"""What bare sockets do with the same blocks: sendmsg from where they lie, recvmsg_into where they go, nothing else."""

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrelay.connector.bench_blocks import Case
from kvrelay.connector.bench_sides import Received, Sent
from kvrelay.connector.transport.base import Region

KINDS = ("tcp socket", "unix socket")
_MAX_PARTS = 512  # of one call; the kernel takes 1,024


class SocketReceiver:
    """D's end."""

    def __init__(self, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvrelay-bench-")
        if kind == "tcp socket":
            self._listener = socket.create_server(("127.0.0.1", 0))
            _use_cubic(self._listener)
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self.address = str(Path(self._folder.name, "socket"))
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.address)
            self._listener.listen()
        self._socket: socket.socket | None = None

    def receive(self, target: Region, block_ids: Sequence[int], count: int) -> Received:
        """`count` times these blocks; each is answered with a byte, before the next."""
        socket_ = self._socket = self._socket or self._listener.accept()[0]
        cpu_before, landed_ns = time.process_time(), []
        for _ in range(count):
            views = [memoryview(target[block_id]) for block_id in block_ids]
            _move(views, lambda parts: socket_.recvmsg_into(parts)[0])
            landed_ns.append(time.monotonic_ns())
            socket_.sendall(b"!")
        return Received(landed_ns, time.process_time() - cpu_before)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._listener.close()
        self._folder.cleanup()


class SocketSender:
    """P's end."""

    def __init__(self, address: str) -> None:
        if address.startswith("/"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        else:
            host, _, port = address.rpartition(":")
            self._socket = socket.socket()
            _use_cubic(self._socket)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.connect((host, int(port)))

    def send(self, source: Region, block_ids: Sequence[int], count: int) -> Sent:
        begun_ns, cpu_before = [], time.process_time()
        for _ in range(count):
            begun_ns.append(time.monotonic_ns())
            views = [memoryview(source[block_id]) for block_id in block_ids]
            _move(views, self._socket.sendmsg)
            self._socket.recv(1)
        return Sent(begun_ns, time.process_time() - cpu_before)

    def close(self) -> None:
        self._socket.close()


def copy_blocks(source: Region, target: Region, case: Case, count: int) -> Received:
    """What one thread does that may copy where it likes: the time of each pass, as if it had begun at 0."""
    pairs = list(zip(case.order(0), case.order(1), strict=True))
    cpu_before, taken_ns = time.process_time(), []
    for _ in range(count):
        began_ns = time.monotonic_ns()
        for source_id, target_id in pairs:
            target[target_id] = source[source_id]
        taken_ns.append(time.monotonic_ns() - began_ns)
    return Received(taken_ns, time.process_time() - cpu_before)


def _move(views: list[memoryview], call: Callable[[list[memoryview]], int]) -> None:
    """Have `call` move all bytes of the views, in order; it says how many it has moved each time."""
    first = 0
    while first < len(views):
        moved = call(views[first : first + _MAX_PARTS])
        if not moved:
            raise ConnectionError("the other side is gone")
        while first < len(views) and moved >= len(views[first]):
            moved -= len(views[first])
            first += 1
        if moved:
            views[first] = views[first][moved:]


def _use_cubic(socket_: socket.socket) -> None:
    """bbr, some hosts' default, paces loopback: seen 3.2 GB/s where cubic gave 5.5."""
    with contextlib.suppress(OSError):
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
