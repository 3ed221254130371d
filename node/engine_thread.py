"""The engine thread: a bounded inbox, and a loop that turns the node's core whenever there is something to do.

An idle node waits on a condition and uses no CPU. Messages are served between steps; one that raises is logged and
dropped, for a message that touches a request handles its own errors.
"""

import os
import threading
from collections import deque
from collections.abc import Callable

from kvrelay.engine.errors import ResourceExhausted
from kvrelay.engine.log import fields, get_logger
from kvrelay.node.core import NodeCore

log = get_logger(__name__)

MAX_INBOX = 65_536
THREAD_NAME = "kvrelay-engine"


class EngineThread:
    """Owns a NodeCore from `start` to `stop`; everything else talks to it through `post` and `wake`."""

    def __init__(self, on_death: Callable[[BaseException], None], nice: int = 0) -> None:
        """`on_death` runs on the engine thread if its loop itself fails: the node cannot go on. `nice`: of the engine
        thread alone, which computes."""
        self._nice = nice
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._awake = False
        self._stopping = False
        self._on_death = on_death
        self._thread: threading.Thread | None = None

    def start(self, core: NodeCore) -> None:
        self._thread = threading.Thread(target=self._run, args=(core,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def post(self, message: Callable[[], None]) -> None:
        """Have `message` run on the engine thread before its next step. Any thread.

        Raises: ResourceExhausted when the inbox is full.
        """
        with self._condition:
            if len(self._inbox) >= MAX_INBOX:
                raise ResourceExhausted(f"the node's inbox is full: {MAX_INBOX} messages")
            self._inbox.append(message)
            self._condition.notify()

    def wake(self) -> None:
        """Have the loop take a turn: the connector has events. Any thread."""
        with self._condition:
            self._awake = True
            self._condition.notify()

    def stop(self, timeout_s: float) -> None:
        """End the loop after the step it is in, and close the core's connector."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, core: NodeCore) -> None:
        try:
            if self._nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            wait_s: float | None = None
            while self._wait(wait_s):
                self._serve()
                wait_s = core.turn()
        except BaseException as error:  # the root of the thread: the node cannot go on without it
            log.critical("engine_thread_died", exc_info=True)
            self._on_death(error)
        finally:
            core.close()

    def _wait(self, wait_s: float | None) -> bool:
        """Wait until there is something to do; False when the loop is to end."""
        with self._condition:
            if wait_s is None or wait_s > 0:
                self._condition.wait_for(lambda: self._inbox or self._awake or self._stopping, wait_s)
            self._awake = False
            return not self._stopping

    def _serve(self) -> None:
        with self._condition:
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            try:
                message()
            except Exception:  # one message's root
                log.exception("message_failed", extra=fields(message=repr(message)))
