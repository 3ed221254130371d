"""An event loop on a thread of its own, and how other threads wait for what runs there.

A notebook's thread runs a loop already, and a script's has none; so neither is used. What waits here can be
interrupted, and then ends what it waited for.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvrelay.engine.errors import Unavailable

THREAD_NAME = "kvrelay-llm"

T = TypeVar("T")
Resource = TypeVar("Resource")


class LoopThread(Generic[Resource]):
    """A loop that holds `resource` open from the constructor to `close`."""

    def __init__(self, resource: AbstractAsyncContextManager[Resource]) -> None:
        """Returns when it is open. Raises: what opening it raised."""
        self._lock = threading.Lock()  # what is scheduled before `close` runs before it
        self._is_closed = False
        opened: Future[Resource] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._hold(resource, opened)), name=THREAD_NAME, daemon=True
        )
        self._thread.start()
        self._resource: Resource | None = opened.result()

    @property
    def resource(self) -> Resource:
        """Raises: Unavailable after `close`."""
        if self._resource is None:
            raise Unavailable("this LLM is closed")
        return self._resource

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait. Raises: what it raises; Unavailable if the loop is closed, before or meanwhile."""

        async def tell(emit: Callable[[T], None]) -> None:
            emit(await coroutine)

        try:
            (result,) = self.follow(tell)
        finally:
            coroutine.close()
        return result

    def follow(self, run: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]) -> Generator[T]:
        """Run `run(emit)` there, and yield here what it emits. Closing the generator, or an interrupt, cancels it and
        waits until it has ended.

        Raises: what it raises; Unavailable if the loop is closed, before or meanwhile.
        """
        emitted: SimpleQueue[tuple[T] | asyncio.Task[None]] = SimpleQueue()
        running: list[asyncio.Task[None]] = []

        def start() -> None:
            task = asyncio.ensure_future(run(lambda item: emitted.put((item,))))
            task.add_done_callback(emitted.put)
            running.append(task)

        self._schedule(start)
        ended: asyncio.Task[None] | None = None
        try:
            while ended is None:
                item = emitted.get()
                if isinstance(item, tuple):
                    yield item[0]
                else:
                    ended = item
        finally:
            if ended is None:
                self._cancel(running)
                while isinstance(emitted.get(), tuple):
                    pass
        if ended.cancelled():
            raise Unavailable("this LLM was closed")
        ended.result()

    def close(self) -> None:
        """End what runs, close the resource, end the thread. Again: nothing, after the first has come to its end."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._resource = None

    def _schedule(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise Unavailable("this LLM is closed")
            self._loop.call_soon_threadsafe(callback)

    def _cancel(self, running: list[asyncio.Task[None]]) -> None:
        with self._lock:
            if not self._is_closed:  # else it is cancelled already
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in running])

    async def _hold(self, resource: AbstractAsyncContextManager[Resource], opened: Future[Resource]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        try:
            async with resource as held:
                opened.set_result(held)
                await self._closing.wait()
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)
