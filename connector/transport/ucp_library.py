"""libucp itself: where it is found, and its functions typed for ctypes."""

import ctypes
import importlib
import os
from collections import deque
from ctypes import byref, c_char_p, c_int8, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, Protocol

from kvrelay.engine.errors import ConfigError

INFINIBAND = Path("/sys/class/infiniband")  # a folder for each device with verbs
API = (1, 14)  # the first libucp that has all that is used here


class Unclosed(Protocol):
    """A worker that could not be closed."""

    def try_destroy(self) -> bool: ...


class Library:
    """libucp, its functions typed.

    Raises: ConfigError if there is none, or it is too old.
    """

    def __init__(self) -> None:
        lib = _load()
        version = (c_uint * 3)()
        lib.ucp_get_version(byref(version, 0), byref(version, 4), byref(version, 8))
        self.version = ".".join(str(number) for number in version)
        if tuple(version) < API:
            raise ConfigError(f"libucp {self.version}: the ucx transport needs {API[0]}.{API[1]} or later")
        self.init = _typed(lib.ucp_init_version, c_int8, c_uint, c_uint, c_void_p, c_void_p, c_void_p)
        self.cleanup = _typed(lib.ucp_cleanup, None, c_void_p)
        self.config_read = _typed(lib.ucp_config_read, c_int8, c_char_p, c_char_p, c_void_p)
        self.config_modify = _typed(lib.ucp_config_modify, c_int8, c_void_p, c_char_p, c_char_p)
        self.config_release = _typed(lib.ucp_config_release, None, c_void_p)
        self.worker_create = _typed(lib.ucp_worker_create, c_int8, c_void_p, c_void_p, c_void_p)
        self.worker_destroy = _typed(lib.ucp_worker_destroy, None, c_void_p)
        self.worker_efd = _typed(lib.ucp_worker_get_efd, c_int8, c_void_p, c_void_p)
        self.worker_arm = _typed(lib.ucp_worker_arm, c_int8, c_void_p)
        self.worker_progress = _typed(lib.ucp_worker_progress, c_uint, c_void_p)
        self.set_handler = _typed(lib.ucp_worker_set_am_recv_handler, c_int8, c_void_p, c_void_p)
        self.listen = _typed(lib.ucp_listener_create, c_int8, c_void_p, c_void_p, c_void_p)
        self.listener_query = _typed(lib.ucp_listener_query, c_int8, c_void_p, c_void_p)
        self.listener_reject = _typed(lib.ucp_listener_reject, c_int8, c_void_p, c_void_p)
        self.listener_destroy = _typed(lib.ucp_listener_destroy, None, c_void_p)
        self.endpoint_create = _typed(lib.ucp_ep_create, c_int8, c_void_p, c_void_p, c_void_p)
        self.endpoint_close = _typed(lib.ucp_ep_close_nbx, c_void_p, c_void_p, c_void_p)
        self.send = _typed(
            lib.ucp_am_send_nbx, c_void_p, c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p
        )
        self.receive = _typed(lib.ucp_am_recv_data_nbx, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p)
        self.request_free = _typed(lib.ucp_request_free, None, c_void_p)
        self.unclosed: deque[Unclosed] = deque()  # any thread's; see `Worker.close`
        self.request_status = _typed(lib.ucp_request_check_status, c_int8, c_void_p)


def _load() -> Any:
    """The system's libucp where there are devices with verbs, which the wheel's build cannot use; else the wheel's."""
    order = [_load_system, _load_wheel] if has_rdma() else [_load_wheel, _load_system]
    for load in order:
        lib = load()
        if lib is not None:
            return lib
    raise ConfigError("kv_transport = ucx: no libucp here; install kvrelay[ucx], or the distribution's UCX")


def _load_system() -> Any:
    _keep_off_stdout()
    try:
        return ctypes.CDLL("libucp.so.0")
    except OSError:
        return None


def _load_wheel() -> Any:
    _keep_off_stdout()
    try:
        libucx = importlib.import_module("libucx")
    except ImportError:
        return None
    return libucx.load_library()[-1]


def _keep_off_stdout() -> None:
    """UCX logs to standard output unless told otherwise before it is loaded."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")


def has_rdma() -> bool:
    """Whether this machine has a device with verbs."""
    try:
        return any(INFINIBAND.iterdir())
    except OSError:
        return False


def has_ucx() -> bool:
    """Whether `auto` may use UCX here: there is RDMA, and a libucp. Without RDMA, nothing is loaded to find out."""
    return has_rdma() and has_libucp()


def has_libucp() -> bool:
    """Whether there is a libucp, the system's or the wheel's."""
    return _load_system() is not None or _load_wheel() is not None


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
