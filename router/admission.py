"""How many client calls run at once, and whether new ones are taken."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.engine.errors import ResourceExhausted, Unavailable


class Admission:
    """Counts calls in and out. Belongs to the event loop."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_requests = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """One call's stay.

        Raises: ResourceExhausted beyond the limit, Unavailable while draining.
        """
        if self.draining:
            raise Unavailable("this router is shutting down")
        if self.num_requests >= self._max_requests:
            raise ResourceExhausted(f"{self._max_requests} requests wait or run already")
        self.num_requests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self._empty.set()

    async def drain(self) -> None:
        """Take nothing new, and wait until the last call has left."""
        self.draining = True
        await self._empty.wait()
