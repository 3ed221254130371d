"""UCX as far as the transport over it needs it: libucp's C interface by ctypes. Knows nothing of grants or blocks.

Active messages, because of them alone the receiver decides: a large one is announced, and its bytes are fetched into a
buffer of ours or not at all. (Tags would queue whatever anybody sends, without a limit; puts would let P's side write.)

A worker, its endpoints and all their callbacks belong to one thread, which waits on `Worker.fileno()`. No call blocks.
"""

import ctypes
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from typing import Any

from kvrelay.connector.transport import ucp_abi as abi
from kvrelay.connector.transport.ucp_library import API, Library
from kvrelay.engine.errors import Unavailable
from kvrelay.engine.log import get_logger

log = get_logger(__name__)

_LAST_ERROR = -100  # as a pointer, every error is at or above it
_OK, _IN_PROGRESS = 0, 1
_FEATURE_WAKEUP, _FEATURE_AM = 1 << 4, 1 << 6
_THREAD_SERIALIZED = 1
_ERRORS_PEER = 1
_CLOSE_FORCE = 1 << 0
_CLIENT_SERVER = 1 << 0
_ANNOUNCED = 1 << 17
_OP_CALLBACK, _OP_USER_DATA, _OP_FLAGS, _OP_MEMORY_TYPE = 1 << 1, 1 << 2, 1 << 4, 1 << 6
_MEMORY_HOST = 0
_MESSAGE_ID = 7
MAX_UNCLOSED = 32  # workers set aside for frozen peers, with at most 4 MiB of our buffers each
_MAX_ROUNDS = 64  # of progress, before the thread's other callers have their turn
_CLOSE_S = 0.1  # for UCX to let go of a connection; to a frozen peer it takes as long as the peer is frozen
# With error handling on, UCX uses shared memory only where it is told that these can bear a peer's death; without it,
# a peer's death may abort the survivor. And a restarted node takes the port that it had.
_DEFAULTS = {"MM_ERROR_HANDLING": "y", "CMA_MEMORY_INVALIDATE": "y", "TCP_CM_REUSEADDR": "y"}

Done = Callable[[bool], None]
"""Called once, when UCX touches the buffer no more: whether all of it was moved."""


def sweep(library: Library) -> None:
    """Destroy the workers that could not be closed and now can be."""
    for _ in range(len(library.unclosed)):
        try:
            worker = library.unclosed.popleft()
        except IndexError:  # another thread's sweep has it
            return
        if not worker.try_destroy():
            library.unclosed.append(worker)


class Context:
    """UCX in this process, for connections of one kind. On this host alone it opens no port but loopback's.

    Raises: Unavailable.
    """

    def __init__(self, library: Library, *, is_local: bool) -> None:
        self.libucp = library
        self.handle = c_void_p()
        self.num_workers = 0
        self.is_closed = False
        config = c_void_p()
        _check(library.config_read(None, None, byref(config)), "its configuration cannot be read")
        defaults = _DEFAULTS | ({"NET_DEVICES": "lo"} if is_local else {})
        for name, value in defaults.items():
            if f"UCX_{name}" not in os.environ:
                library.config_modify(config, name.encode(), value.encode())  # an older UCX may not know all of them
        params = abi.Params(field_mask=1 << 0 | 1 << 5, features=_FEATURE_AM | _FEATURE_WAKEUP, mt_workers_shared=1)
        status = library.init(*API, byref(params), config, byref(self.handle))
        library.config_release(config)
        _check(status, "cannot start")

    def close(self) -> None:
        """After its workers, and with the last of them."""
        self.is_closed = True
        if self.num_workers == 0:
            self.libucp.cleanup(self.handle)

    def worker_destroyed(self) -> None:
        self.num_workers -= 1
        if self.is_closed and self.num_workers == 0:
            self.libucp.cleanup(self.handle)


class Worker:
    """At most one connection, or a listener, and all that is on its way over it.

    `on_message(header, data, size, is_announced)`: a message has come. If announced, `data` names it for `fetch`, which
    must be called then or never, and nothing has been received; else it is the address of the bytes, until it returns.
    `on_error(reason)`: the connection is gone. Both are called by `progress` alone, and so is each `Done`; `close` must
    not be called by them.

    Raises: Unavailable.
    """

    def __init__(
        self,
        context: Context,
        on_message: Callable[[bytes, int, int, bool], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._library = context.libucp
        if len(self._library.unclosed) >= MAX_UNCLOSED:
            raise Unavailable(f"{MAX_UNCLOSED} connections to peers that stand still are not closed yet")
        self._context = context
        self._on_message = on_message
        self._on_error = on_error
        self._on_connect: Callable[[int], None] | None = None
        self._endpoint = c_void_p()
        self._closing: int | None = None  # UCX's request, while it lets go of the endpoint
        self._listener = c_void_p()
        self._operations: dict[int, tuple[Done, Any]] = {}  # what waits for its end, with what must live so long
        self._numbers = itertools.count(1)
        self._is_fetching = False
        self._handle = c_void_p()
        params = abi.WorkerParams(field_mask=1 << 0, thread_mode=_THREAD_SERIALIZED)
        _check(self._library.worker_create(context.handle, byref(params), byref(self._handle)), "cannot make a worker")
        context.num_workers += 1
        self._callbacks = (  # UCX has their addresses: they live as long as this
            abi.ON_MESSAGE(self._message),
            abi.ON_SENT(self._sent),
            abi.ON_RECEIVED(self._received),
            abi.ON_CONNECT(self._connected),
            abi.ON_ERROR(self._failed),
        )
        self._message_at, self._sent_at, self._received_at, self._connect_at, self._error_at = (
            ctypes.cast(callback, c_void_p).value for callback in self._callbacks
        )
        handler = abi.HandlerParam(field_mask=1 << 0 | 1 << 2, id=_MESSAGE_ID, callback=self._message_at)
        _check(self._library.set_handler(self._handle, byref(handler)), "cannot receive messages")
        descriptor = c_int()
        _check(self._library.worker_efd(self._handle, byref(descriptor)), "has nothing to wait for")
        self._descriptor = descriptor.value

    def fileno(self) -> int:
        """Readable when `progress` has something to do, after it has answered True."""
        return self._descriptor

    def progress(self) -> bool:
        """Do what can be done now. False: there may be more at once."""
        for _ in range(_MAX_ROUNDS):
            if not self._library.worker_progress(self._handle) and self._library.worker_arm(self._handle) == _OK:
                return True
        return False

    # --- connections ---------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int, on_connect: Callable[[int], None]) -> int:
        """Call `on_connect` with each request to connect, for `accept` or `reject`. The port.

        Raises: Unavailable.
        """
        self._on_connect = on_connect
        address = socket_address(host, port)
        params = abi.ListenerParams(field_mask=1 << 0 | 1 << 2)
        params.sockaddr = abi.SocketAddress(ctypes.addressof(address), ctypes.sizeof(address))
        params.conn_handler.callback = self._connect_at
        _check(self._library.listen(self._handle, byref(params), byref(self._listener)), f"cannot listen on {host}")
        bound = abi.ListenerAttributes(field_mask=1 << 0)
        _check(self._library.listener_query(self._listener, byref(bound)), "does not say its port")
        return int.from_bytes(bytes(bound.sockaddr)[2:4], "big")

    def reject(self, request: int) -> None:
        self._library.listener_reject(self._listener, request)

    def accept(self, request: int) -> None:
        """Raises: Unavailable."""
        params = abi.EndpointParams(field_mask=1 << 1 | 1 << 2 | 1 << 6, err_mode=_ERRORS_PEER, conn_request=request)
        self._open(params)

    def connect(self, host: str, port: int) -> None:
        """Start to connect. Waits for nothing but the name's address.

        Raises: Unavailable.
        """
        address = socket_address(host, port)
        params = abi.EndpointParams(
            field_mask=1 << 1 | 1 << 2 | 1 << 4 | 1 << 5, err_mode=_ERRORS_PEER, flags=_CLIENT_SERVER
        )
        params.sockaddr = abi.SocketAddress(ctypes.addressof(address), ctypes.sizeof(address))
        self._open(params)

    def _open(self, params: abi.EndpointParams) -> None:
        params.err_handler.callback = self._error_at
        status = self._library.endpoint_create(self._handle, byref(params), byref(self._endpoint))
        _check(status, "cannot connect")

    def close(self) -> None:
        """End it all; the peer is not asked. UCX touches no buffer of it afterwards, with one exception.

        While a peer is frozen UCX may not let go of the connection, and to destroy the worker then aborts the process.
        Such a worker is set aside with its buffers, does nothing, and goes when `sweep` finds the peer dead or awake.
        """
        if self._listener:
            self._library.listener_destroy(self._listener)
            self._listener = c_void_p()
        if self._endpoint:
            param = abi.RequestParam(op_attr_mask=_OP_FLAGS, flags=_CLOSE_FORCE)
            request = self._library.endpoint_close(self._endpoint, byref(param))
            self._endpoint = c_void_p()
            self._closing = request if _is_request(request) else None
        deadline = time.monotonic() + _CLOSE_S
        while not self.try_destroy():
            if time.monotonic() > deadline:
                self._library.unclosed.append(self)
                return
            select.select([self._descriptor], [], [], 0.01)

    def try_destroy(self) -> bool:
        """Whether UCX has let go of the connection, and all is over."""
        self.progress()
        if self._closing is not None:
            if self._library.request_status(self._closing) == _IN_PROGRESS:
                return False
            self._library.request_free(self._closing)
            self._closing = None
        self._library.worker_destroy(self._handle)
        self._context.worker_destroyed()
        for number in list(self._operations):
            self._finish(number, False)
        return True

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, header: bytes, address: int, size: int, done: Done) -> None:
        """Send a header and `size` bytes. The buffer is UCX's until `done`; it may be called at once."""
        number = self._begin(done, header)
        param = abi.RequestParam(
            op_attr_mask=_OP_CALLBACK | _OP_USER_DATA | _OP_MEMORY_TYPE,
            callback=self._sent_at,
            user_data=number,
            memory_type=_MEMORY_HOST,
        )
        self._settle(
            number,
            self._library.send(self._endpoint, _MESSAGE_ID, header, len(header), address, size, byref(param)),
        )

    def fetch(self, data: int, address: int, size: int, done: Done) -> None:
        """Receive an announced message's bytes. The buffer is UCX's until `done`; it may be called at once."""
        self._is_fetching = True
        number = self._begin(done, None)
        param = abi.RequestParam(
            op_attr_mask=_OP_CALLBACK | _OP_USER_DATA | _OP_MEMORY_TYPE,
            callback=self._received_at,
            user_data=number,
            memory_type=_MEMORY_HOST,
        )
        self._settle(number, self._library.receive(self._handle, data, address, size, byref(param)))

    def _begin(self, done: Done, kept: Any) -> int:
        number = next(self._numbers)
        self._operations[number] = (done, kept)
        return number

    def _settle(self, number: int, request: int | None) -> None:
        """What UCX answers to a new operation: done, failed, or a request whose callback follows."""
        if not _is_request(request):
            self._finish(number, request is None)

    def _finish(self, number: int, ok: bool) -> None:
        done, _kept = self._operations.pop(number)
        done(ok)

    # --- UCX's callbacks: nothing may be raised into it ----------------------------------------------------------

    def _message(
        self, _argument: Any, header: int | None, header_size: int, data: int | None, size: int, param: int
    ) -> int:
        self._is_fetching = False
        try:
            received = abi.ReceiveParam.from_address(param)
            head = ctypes.string_at(header, header_size) if header else b""
            self._on_message(head, data or 0, size, bool(received.recv_attr & _ANNOUNCED))
        except Exception:  # the root of a callback from C
            log.exception("ucx_callback_failed")
        return _IN_PROGRESS if self._is_fetching else _OK

    def _sent(self, request: int, status: int, number: int) -> None:
        self._ended(request, status, number)

    def _received(self, request: int, status: int, _size: int, number: int) -> None:
        self._ended(request, status, number)

    def _ended(self, request: int, status: int, number: int) -> None:
        try:
            self._library.request_free(request)
            self._finish(number, status == _OK)
        except Exception:  # the root of a callback from C
            log.exception("ucx_callback_failed")

    def _connected(self, request: int, _argument: Any) -> None:
        try:
            assert self._on_connect is not None
            self._on_connect(request)
        except Exception:  # the root of a callback from C
            log.exception("ucx_callback_failed")

    def _failed(self, _argument: Any, _endpoint: int, status: int) -> None:
        try:
            self._on_error(f"UCX says {status}")
        except Exception:  # the root of a callback from C
            log.exception("ucx_callback_failed")


def socket_address(host: str, port: int) -> "ctypes.Array[ctypes.c_char]":
    """A sockaddr.

    Raises: Unavailable for a name that has no address.
    """
    try:
        family, _kind, _protocol, _name, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Unavailable(f"{host}:{port}: {error}") from error
    packed = socket.inet_pton(family, str(found[0]).partition("%")[0])
    if family == socket.AF_INET6:
        flow, scope = found[2:4] if len(found) == 4 else (0, 0)
        parts = struct.pack("=H", family) + struct.pack("!HI", port, flow) + packed + struct.pack("=I", scope)
    else:
        parts = struct.pack("=H", family) + struct.pack("!H", port) + packed + bytes(8)
    return ctypes.create_string_buffer(parts, len(parts))


def bytes_at(address: int, size: int) -> "ctypes.Array[ctypes.c_uint8]":
    """A view of memory that UCX lends during a message's callback."""
    return (ctypes.c_uint8 * size).from_address(address)


def _is_request(answer: int | None) -> bool:
    return answer is not None and answer < 2**64 + _LAST_ERROR


def _check(status: int, what: str) -> None:
    if status != _OK:
        raise Unavailable(f"UCX {what}: status {status}")
