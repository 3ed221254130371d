"""ZMQ sockets as this connector uses them: no silent reconnect, nothing queued for a peer that is not there, limits
on every message, and a monitor on each so that a peer's death is seen in milliseconds.
"""

from collections.abc import Callable
from enum import Enum, auto

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrelay.connector import curve
from kvrelay.connector.loop import Loop, Timer
from kvrelay.engine.errors import ConfigError

_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKES_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKE_MS = 5000
_BACKLOG = 512
# The monitor speaks before the socket has let go of the connection: a probe at once may still find it (up to 1 ms
# seen with libzmq 4.3.5), so it is repeated.
_PROBE_DELAYS_S = (0.0, 0.01, 0.05, 0.2)


def url(address: str) -> str:
    """The endpoint of "host:port" or "[v6]:port"."""
    return f"tcp://{address}"


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", *, max_queued: int, max_bytes: int, routing_id: bytes = b""
) -> "zmq.Socket[bytes]":
    """A DEALER that will connect once, and is writable only while it is connected.

    It is not connected yet: its monitor comes first, or an attempt that fails at once would go unseen.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, max_queued)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if routing_id:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    return socket


def listen(
    context: "zmq.Context[zmq.Socket[bytes]]",
    host: str,
    port: int,
    *,
    max_queued: int,
    max_bytes: int,
    curve_secret: str = "",
) -> tuple["zmq.Socket[bytes]", int]:
    """A bound ROUTER that says when a peer cannot be reached, and its port (`port` 0: any free one).

    `curve_secret`: it speaks CURVE, with those that know it alone.

    Raises: ConfigError if the address cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, max_queued)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if curve_secret:
        curve.serve(socket, curve_secret)
    try:
        socket.bind(url(join_address(host, port)))
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error}") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return socket, int(endpoint.rstrip(b"\0").rpartition(b":")[2])


class Monitored:
    """A socket, watched by a loop for connections that end. To be used on the loop's thread only."""

    def __init__(self, loop: Loop, socket: "zmq.Socket[bytes]", on_end: Callable[[], None]) -> None:
        self.socket = socket
        self.has_failed_handshake = False
        self._loop = loop
        self._on_end = on_end
        self._monitor = socket.get_monitor_socket(_ENDS)
        loop.watch(self._monitor, zmq.POLLIN, self._read_monitor)
        self._flags = 0

    def watch(self, flags: int, callback: Callable[[], None]) -> None:
        """Run `callback` when the socket is ready; replaces the watch there was. No flags: none."""
        if self._flags:
            self._loop.unwatch(self.socket)
        self._flags = flags
        if flags:
            self._loop.watch(self.socket, flags, callback)

    def connect(self, address: str) -> str:
        """Start to connect, to "host:port". What is wrong with the address, or nothing; what fails later is told to
        `on_end`."""
        try:
            self.socket.connect(url(address))
        except zmq.ZMQError as error:
            return f"{address}: {error}"
        return ""

    def close(self, linger_ms: int = 0) -> None:
        """Let go of the connection; what is queued may still go out for `linger_ms`."""
        if self._flags:
            self._loop.unwatch(self.socket)
        self._loop.unwatch(self._monitor)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger_ms)

    def _read_monitor(self) -> None:
        ended = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            ended = ended or bool(event["event"] & _ENDS)
            self.has_failed_handshake |= bool(event["event"] & _HANDSHAKES_FAILED)
        if ended:
            self._on_end()


class Prober:
    """After some connection of a ROUTER has ended, asks repeatedly which: the monitor does not say."""

    def __init__(self, loop: Loop, probe: Callable[[], None]) -> None:
        self._loop = loop
        self._probe = probe
        self._timers: list[Timer] = []

    def start(self) -> None:
        self.stop()
        self._timers = [self._loop.call_in(delay_s, self._probe) for delay_s in _PROBE_DELAYS_S]

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()


class Sent(Enum):
    """What became of a message to one peer of a ROUTER."""

    QUEUED = auto()
    FULL = auto()  # the peer does not read
    GONE = auto()


def send_to(router: "zmq.Socket[bytes]", routing_id: bytes, payload: bytes) -> Sent:
    """Send without waiting."""
    try:
        router.send_multipart([routing_id, payload], zmq.NOBLOCK)
    except zmq.Again:
        return Sent.FULL
    except zmq.ZMQError:
        return Sent.GONE
    return Sent.QUEUED
