"""Time that passes only when nobody has anything else to do: seconds of waiting take no time."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any

from kvrelay.engine.clock import FakeClock

_TURNS = 50  # of the event loop, after which whoever could go on has


class VirtualTimer(FakeClock):
    """A clock that can be waited for, and that `run` moves on."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def sleep_until(self, moment: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment, next(self._numbers), woken))
        await woken

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self.now() + seconds)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run to the end."""
        asyncio.run(self._drive(main))

    async def _drive(self, main: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(main)
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            moment, _, woken = heapq.heappop(self._sleepers)
            self.advance(max(0.0, moment - self.now()))
            woken.set_result(None)
