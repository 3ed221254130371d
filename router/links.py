"""The way to each node: one bounded queue a stream, in order, and the reason for which the stream ends."""

import asyncio

from kvrelay.engine.errors import KvrelayError, Unavailable
from kvrelay.router.messages import ToNode


class Link:
    """The way to one node: a bounded queue, and the reason for which the stream ends."""

    def __init__(self, max_backlog: int) -> None:
        self.queue: asyncio.Queue[ToNode] = asyncio.Queue(max_backlog)
        self._closed: asyncio.Future[KvrelayError | None] = asyncio.get_running_loop().create_future()

    def send(self, message: ToNode) -> None:
        """Queue a message; a node that does not read loses its stream, not the router its memory."""
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close(Unavailable(f"the node does not read: {self.queue.maxsize} messages wait"))

    def close(self, error: KvrelayError | None) -> None:
        """End the stream; the first reason counts. None: the node itself ended it in good order."""
        if not self._closed.done():
            self._closed.set_result(error)

    async def wait_closed(self) -> KvrelayError | None:
        return await self._closed


class Links:
    """The links of all registered nodes, by epoch. Belongs to the event loop."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def __getitem__(self, epoch: str) -> Link:
        return self._links[epoch]

    def add(self, epoch: str, link: Link) -> None:
        self._links[epoch] = link

    def remove(self, epoch: str, link: Link) -> bool:
        """Forget a link. Returns: False if it was no longer the way to this node."""
        if self._links.get(epoch) is not link:
            return False
        del self._links[epoch]
        return True

    def send(self, epoch: str, message: ToNode) -> None:
        """Queue a message for a node. For a node that is gone: nothing."""
        if epoch in self._links:
            self._links[epoch].send(message)

    def close(self, error: KvrelayError) -> None:
        """End every stream."""
        for link in self._links.values():
            link.close(error)
