"""Hears what a transport's writer or reader has to say."""

import threading


class Recorder:
    """WriterEvents and ReaderEvents, kept."""

    def __init__(self):
        self.heard = []
        self.lock = threading.Lock()

    def _add(self, *what):
        with self.lock:
            self.heard.append(what)

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

    def has(self, *what):
        with self.lock:
            return what in self.heard or what in [h[:1] for h in self.heard]

    def of(self, name):
        """What was heard under this name."""
        with self.lock:
            return [what[1:] for what in self.heard if what[0] == name]

    def count(self, *what):
        """How often something that begins so was heard."""
        with self.lock:
            return sum(heard[: len(what)] == what for heard in self.heard)

    def num_written(self):
        """In bytes."""
        return sum(num_bytes for (num_bytes,) in self.of("written"))
