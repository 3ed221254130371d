"""A transport in memory whose pieces move when the test says so, or at once. Two-sided, unless the network is not."""

import threading
from collections import deque
from functools import partial
from queue import SimpleQueue

import numpy as np

from kvrelay.connector.messages import Endpoint


class FakeNetwork:
    """Joins fake writers and one fake reader. By default a piece is read as soon as it is written.

    `hold` keeps pieces in flight until `deliver`; `stays_in_piece` keeps the reader inside the piece that it reads
    until `leave_piece`; `writers_stay` keeps writers inside what they write. Links' faults: `support/faulty_link.py`.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.in_flight = deque()
        self.is_held = False
        self.stays_in_piece = False
        self.writers_stay = False
        self.is_one_sided = False
        self.reader = None
        self.links = []
        self._events = SimpleQueue()
        threading.Thread(target=self._say_all, name="fake-network", daemon=True).start()

    def say(self, events):
        """On a thread of the network's own with no lock held, as every transport does."""
        for event in events:
            self._events.put(event)

    def _say_all(self):
        while True:
            self._events.get()()

    def hold(self):
        self.is_held = True

    def send(self, grant, copy, data):
        with self.lock:
            self.in_flight.append((grant, copy, data))
        if not self.is_held:
            self.deliver()

    def deliver(self, count=None):
        """Let the oldest pieces arrive: all, or so many."""
        events = []
        with self.lock:
            for _ in range(len(self.in_flight) if count is None else min(count, len(self.in_flight))):
                events += self.reader.take(*self.in_flight.popleft())
        self.say(events)

    def leave_piece(self):
        with self.lock:
            self.stays_in_piece = False
            events = self.reader.leave()
        self.say(events)

    def fail(self):
        """The data connections are gone, with what was on its way."""
        with self.lock:
            self.in_flight.clear()
            nonces = {link.session_nonce for link in self.links if not link.is_closed}
        for link in self.links:
            if not link.is_closed:
                link.events.write_failed(link.session_nonce, "the test cut it")
        for nonce in nonces:
            self.reader.events.read_failed(nonce, "the test cut it")


class FakeWriter:
    name = "fake"

    def __init__(self, network, region):
        self.network = network
        self.region = region

    def reaches(self, address):
        return True

    def connect(self, session_nonce, address, events):
        link = FakeLink(self.network, self.region, session_nonce, events)
        self.network.links.append(link)
        return link

    def close(self):
        pass


class FakeLink:
    def __init__(self, network, region, session_nonce, events):
        self.network = network
        self.region = region
        self.session_nonce = session_nonce
        self.events = events
        self.inside = None
        self.is_closed = False

    def write(self, grant, copies):
        if self.network.writers_stay:
            self.inside = grant
            return
        for copy in copies:
            data = self.region[copy.source_block, copy.start : copy.start + copy.size].copy()
            self.network.send(grant, copy, data)
            self.network.say([partial(self.events.written, grant, copy.size)])

    def stop(self, grant):
        return self.inside != grant

    def leave(self):
        """Of a stopped writer that was inside a piece."""
        grant, self.inside = self.inside, None
        self.network.say([partial(self.events.writer_idle, grant)])

    def close(self):
        self.is_closed = True


class FakeReader:
    num_dropped = 0

    def __init__(self, network, region):
        self.endpoint = Endpoint("fake", "here")
        self.network = network
        self.region = region
        self.targets = {}
        self.missing = {}
        self.inside = None
        self.stopped_inside = False
        network.reader = self

    @property
    def one_sided(self):
        return self.network.is_one_sided

    def start(self, events):
        self.events = events

    def begin_session(self, session_nonce):
        pass

    def end_session(self, session_nonce):
        pass

    def accept(self, grant, block_ids, size=None):
        with self.network.lock:
            self.targets[grant] = tuple(block_ids)
            self.missing[grant] = np.zeros((len(block_ids), self.region.shape[1]), bool)
            self.missing[grant][:, :size] = True

    def stop(self, grant):
        with self.network.lock:
            self.targets.pop(grant, None)
            if self.inside is not None and self.inside[0] == grant:
                self.stopped_inside = True
                return False
            return True

    def take(self, grant, copy, data):
        """Returns: what is to be said of it."""
        events = [] if self.inside is None else self.leave()
        if grant not in self.targets:
            self.num_dropped += 1
            return events
        self.inside = (grant, copy, data, self.targets[grant][copy.index])
        return events if self.network.stays_in_piece else events + self.leave()

    def leave(self):
        grant, copy, data, block = self.inside
        self.inside = None
        self.region[block, copy.start : copy.start + copy.size] = data
        self.missing[grant][copy.index, copy.start : copy.start + copy.size] = False
        if self.stopped_inside:
            self.stopped_inside = False
            return [partial(self.events.reader_idle, grant)]
        if self.missing[grant].any():
            return []
        del self.targets[grant]
        return [partial(self.events.all_in, grant)]

    def close(self):
        pass
