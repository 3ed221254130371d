"""A role as a process: end with its parent, say when it is ready, stop on a signal. Standard library only.

`kvrelay up` passes KVRELAY_READY_FD, a pipe on which a role writes one JSON line when it serves, and KVRELAY_PARENT,
its own pid, with which a role lives and dies.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
from typing import Any

from kvrelay.engine.config import is_loopback
from kvrelay.engine.errors import ConfigError

READY_FD = "KVRELAY_READY_FD"
PARENT = "KVRELAY_PARENT"
CLUSTER_SECRET = "KVRELAY_CLUSTER_SECRET"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Where a parent is named, have the kernel send SIGTERM when it dies (also by SIGKILL)."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the call
        raise SystemExit(1)


def announce_ready(**fields: Any) -> None:
    """Tell whoever started this process that it serves, and where. Does nothing where nobody asked."""
    fd = os.environ.pop(READY_FD, None)
    if fd is None:
        return
    with contextlib.suppress(OSError), os.fdopen(int(fd), "w") as pipe:
        pipe.write(json.dumps(fields) + "\n")


def settle_memory() -> None:
    """To be called once a role serves: what is there now stays, so the garbage collector need not look at it again.

    A walk over the modules of a router takes 30 ms, over a node's several times that, in the middle of a step; and a
    collector that starts after 700 new objects takes a tenth of a router's time (docs/log.md).
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. To be called from the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def cluster_secret() -> str:
    """The cluster secret, from the environment: a flag would show it to every user of the machine. Empty: none."""
    return os.environ.get(CLUSTER_SECRET, "")


def check_bind(bind: str, secret: str, insecure: bool) -> None:
    """Raises: ConfigError for an address beyond loopback without a cluster secret or --insecure."""
    if not is_loopback(bind) and not secret and not insecure:
        raise ConfigError(
            f"bind = {bind}: reaches beyond this machine; set {CLUSTER_SECRET} on every role, or pass --insecure"
        )
