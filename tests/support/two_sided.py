"""For tests of two-sided transports without a connector: one who hears both ends, and pools that are slow."""

import threading

import numpy as np


class Recorder:
    """Hears what a writer or a reader has to say."""

    def __init__(self):
        self._heard = []
        self._lock = threading.Lock()

    def _add(self, *what):
        with self._lock:
            self._heard.append(what)

    def written(self, grant, num_bytes):
        self._add("written", num_bytes)

    def writer_idle(self, grant):
        self._add("writer_idle", grant)

    def write_failed(self, nonce, reason):
        self._add("write_failed", nonce)

    def all_in(self, grant):
        self._add("all_in", grant)

    def reader_idle(self, grant):
        self._add("reader_idle", grant)

    def read_failed(self, nonce, reason):
        self._add("read_failed", nonce)

    def fenced(self, nonce):
        self._add("fenced", nonce)

    def count(self, *what):
        with self._lock:
            return sum(heard[: len(what)] == what for heard in self._heard)

    def num_written(self):
        with self._lock:
            return sum(heard[1] for heard in self._heard if heard[0] == "written")


class SlowRegion:
    """A pool whose blocks are read and written only after the test has let go."""

    def __init__(self, shape, fill):
        self.blocks = np.full(shape, fill, np.uint8)
        self.shape = self.blocks.shape
        self.touched, self.let_go = threading.Event(), threading.Event()

    def __getitem__(self, where):
        self.touched.set()
        assert self.let_go.wait(20)
        return self.blocks[where]

    def __setitem__(self, where, data):
        self.touched.set()
        assert self.let_go.wait(20)
        self.blocks[where] = data
