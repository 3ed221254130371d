"""Any transport's writer, with faults between the connector and its link: what a transport must bear, or must notice.

A fault acts on copies, which every transport has: a piece of a block that never goes, goes twice, goes elsewhere in the
order, carries other bytes, or waits; a link that dies after so many bytes.
"""

import random
import threading
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kvrelay.connector.transport.base import Talking


class Fault(Enum):
    """What happens to copies."""

    NONE = auto()
    DROP = auto()  # one is said to be written, and is not
    DOUBLE = auto()  # each goes twice; what is said to be written is what went, once
    REORDER = auto()  # the last go first, in halves of blocks
    CORRUPT = auto()  # one carries another block's bytes
    STALL = auto()  # they wait for `Faults.release`
    DIE = auto()  # the link fails after `at_byte`


@dataclass
class Faults:
    """What a test sets, for every link of a writer. Read and written under `lock`."""

    fault: Fault = Fault.NONE
    at_byte: int = 0
    rng: random.Random = field(default_factory=random.Random)
    wrong_block: int = 0  # whose bytes a corrupted copy carries
    links: "list[FaultyLink]" = field(default_factory=list)
    num_struck: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def release(self):
        """No fault any more; what waits goes."""
        with self.lock:
            self.fault = Fault.NONE
            for link in self.links:
                link.release()


class FaultyWriter:
    """A Writer over a Writer."""

    def __init__(self, inner, faults):
        self.inner, self.faults = inner, faults
        self.name = inner.name

    def reaches(self, address):
        return self.inner.reaches(address)

    def connect(self, session_nonce, address, events):
        link = FaultyLink(self.faults, session_nonce, events)
        link.inner = self.inner.connect(session_nonce, address, link)
        if isinstance(link.inner, Talking):
            link.say = link.inner.say
        with self.faults.lock:
            self.faults.links.append(link)
        return link

    def close(self):
        self.inner.close()


class FaultyLink:
    """A Link over a Link, and the WriterEvents between."""

    def __init__(self, faults, session_nonce, events):
        self.faults, self.session_nonce, self.events = faults, session_nonce, events
        self.inner = None
        self.is_dead = False
        self.num_bytes = 0  # that went down
        self.surplus = {}  # bytes by grant that the connector does not know of
        self.waiting = []  # writes that are stalled

    # --- Link

    def write(self, grant, copies):
        with self.faults.lock:
            copies = list(copies)
            if not copies or self.is_dead:
                return
            fault = self.faults.fault
            if fault is Fault.STALL or any(grant == other for other, _ in self.waiting):
                self.faults.num_struck += 1
                self.waiting.append((grant, copies))
                return
            self.num_bytes += sum(copy.size for copy in copies)
            self.faults.num_struck += fault is not Fault.NONE
            getattr(self, f"_{fault.name.lower()}")(grant, copies)

    def stop(self, grant):
        with self.faults.lock:
            self.waiting = [(other, copies) for other, copies in self.waiting if other != grant]
        return self.inner.stop(grant)

    def close(self):
        with self.faults.lock:
            self.waiting = []
        self.inner.close()

    def release(self):
        waiting, self.waiting = self.waiting, []
        for grant, copies in waiting:
            self.write(grant, copies)

    # --- faults, with the lock held

    def _none(self, grant, copies):
        self.inner.write(grant, copies)

    def _drop(self, grant, copies):
        lost = copies.pop(self.faults.rng.randrange(len(copies)))
        self.inner.write(grant, copies)
        self.events.written(grant, lost.size)

    def _double(self, grant, copies):
        self.surplus[grant] = self.surplus.get(grant, 0) + sum(copy.size for copy in copies)
        for copy in copies:
            for _ in range(2):  # one call each: a link may sort within a call
                self.inner.write(grant, [copy])

    def _reorder(self, grant, copies):
        halves = [half for copy in copies for half in _halves(copy)]
        for half in reversed(halves):
            self.inner.write(grant, [half])

    def _corrupt(self, grant, copies):
        i = self.faults.rng.randrange(len(copies))
        copies[i] = replace(copies[i], source_block=self.faults.wrong_block)
        self.inner.write(grant, copies)

    def _die(self, grant, copies):
        left = self.faults.at_byte - (self.num_bytes - sum(copy.size for copy in copies))
        if left >= sum(copy.size for copy in copies):
            self.faults.num_struck -= 1
            self.inner.write(grant, copies)
            return
        first = []
        for copy in copies:
            size = min(copy.size, left)
            if size > 0:
                first.append(replace(copy, size=size))
            left -= size
        if first:
            self.inner.write(grant, first)
        self.is_dead = True
        self.inner.close()
        self.events.write_failed(self.session_nonce, "the test broke it")

    # --- WriterEvents, on the writer's thread

    def heard(self, session_nonce, message):
        self.events.heard(session_nonce, message)

    def written(self, grant, num_bytes):
        with self.faults.lock:
            swallowed = min(num_bytes, self.surplus.get(grant, 0))
            if swallowed:
                self.surplus[grant] -= swallowed
        if num_bytes > swallowed:
            self.events.written(grant, num_bytes - swallowed)

    def writer_idle(self, grant):
        self.events.writer_idle(grant)

    def write_failed(self, session_nonce, reason):
        self.events.write_failed(session_nonce, reason)


def _halves(copy):
    first = copy.size // 2
    parts = ((copy.start, first), (copy.start + first, copy.size - first))
    return [replace(copy, start=start, size=size) for start, size in parts if size]
