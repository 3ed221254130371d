"""The walk over all moments at which a request may be left: who stays meanwhile, who leaves, and the looking."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
from support.leaving import BACK_S, Call, Cluster, Leaver, Missed, Standing, View, Way, closing_all, make_request

Condition = Callable[[View], bool]
Kind = tuple[Way, bool]  # how it leaves, and whether it is streamed
STAYS: Kind = (Way.CANCEL, True)  # until it is no longer needed
USUAL_S = 0.4  # in which most moments are reached and seen

# How much longer the clock is set each time that a moment was missed; some last a step or two, and are missed by luck.
_MULTIPLES = (1, 2, 4, 8) * 4


class Neighbours:
    """Requests that stay to their end; then they are checked, and as many new ones come."""

    def __init__(
        self, cluster: Cluster, count: int, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
    ) -> None:
        """`expected`: what each prompt gives by itself; several neighbours may share a prompt."""
        self.calls: list[Call] = []
        self.count = count
        self.num_ended = 0
        self._cluster = cluster
        self._prompts = prompts
        self._expected = expected

    async def be_there(self, *, num_tokens_left: int) -> None:
        """All decode, and each has at least so many tokens before it."""
        most = len(self._expected[0]) - num_tokens_left
        if any(len(call.tokens) > most for call in self.calls):
            await self.end()
        if not self.calls:
            for i in range(self.count):
                prompt, expected = self._prompts[i % len(self._prompts)], self._expected[i % len(self._expected)]
                request = make_request(prompt, max_tokens=len(expected))
                self.calls.append(Call(self._cluster.channel, request))
        await asyncio.gather(*(call.has_tokens(2) for call in self.calls))

    async def end(self) -> None:
        """Each comes to its end, with every token that it would have had alone."""
        for call, expected in self._calls_and_expected():
            assert await call.ended() is grpc.StatusCode.OK, call.details
            assert call.tokens == expected
        self.num_ended += len(self.calls)
        self.calls = []

    async def go(self) -> None:
        """Nobody is needed any more. Some have come to their end, then or before."""
        if not self.num_ended:
            await self.end()
        for call, expected in self._calls_and_expected():
            assert not call.is_over
            assert call.tokens == expected[: len(call.tokens)]
            call.cancel()
        self.calls = []

    def _calls_and_expected(self) -> list[tuple[Call, Sequence[int]]]:
        return [(call, self._expected[i % len(self._expected)]) for i, call in enumerate(self.calls)]


class Walk:
    """One way through the moments."""

    def __init__(self, cluster: Cluster, neighbours: Neighbours, streamed: Sequence[bool]) -> None:
        self.cluster = cluster
        self.neighbours = neighbours
        self.kinds: tuple[Kind, ...] = tuple(itertools.product(Way, streamed))
        self.staying = Standing(num_landed=neighbours.count)
        self.after_s = 0.0  # when the clock takes those who leave by it
        self.num_left = 0
        self.num_missed = 0
        self.longest_s = 0.0  # from the clients' leaving to the last block's coming back
        self._sent_at = 0.0
        self._seen_after_s = 0.0
        self._left_at: float | None = None
        self._rng = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        """One that nobody has computed before."""
        return [self._rng.randrange(256) for _ in range(length)]

    async def pass_through(self, moment: Callable[[], Awaitable[None]], after_s: float = USUAL_S) -> None:
        """With the neighbours there and nobody else, and with a clock that is slow enough for this machine."""
        reasons = []
        for multiple in _MULTIPLES:
            self.after_s = multiple * after_s
            await self.neighbours.be_there(num_tokens_left=40)
            await self.cluster.until(self.staying.is_all)
            try:
                return await moment()
            except Missed as missed:
                reasons.append(str(missed))
                self.num_missed += 1
        raise Missed("; ".join(reasons))

    async def one_by_one(self, moment: Callable[[Kind], Awaitable[None]]) -> None:
        """A moment at which there is room for one. The clock is set by how long the others took to come there."""
        longest_s = 0.0
        for kind in self.kinds:
            await self.pass_through(partial(moment, kind), 2.5 * longest_s)
            if not kind[0].by_clock:
                longest_s = max(longest_s, self._seen_after_s)

    @contextlib.asynccontextmanager
    async def sent(
        self,
        kinds: Sequence[Kind],
        *,
        length: int = 4,
        text: str = "",
        when_dialled: Callable[[], object] = lambda: None,
        **more: Any,
    ) -> AsyncIterator[list[Leaver]]:
        """Requests that will be left; their prompts have so many tokens, or this text. `when_dialled` is called when
        the connections stand and nothing is sent."""
        async with closing_all() as leavers:
            lines = [await self.cluster.dial() for _ in kinds]
            when_dialled()
            self._sent_at = time.monotonic()
            for (way, stream), line in zip(kinds, lines, strict=True):
                request = make_request(text or self.prompt(length), stream=stream, **({"max_tokens": 400} | more))
                leavers.append(Leaver(way, line, request, self.after_s))
            yield leavers

    @contextlib.asynccontextmanager
    async def staying_on_d(self, count: int) -> AsyncIterator[list[Leaver]]:
        """So many more requests, each with a block of D: landed, and without a token of any step as long as older ones
        take them all. They leave at the end, or before (`release`)."""
        async with self.sent([STAYS] * count) as landed:
            with self._staying(Standing(num_landed=self.staying.num_landed + count)):
                await self.see(landed, self.staying.is_all, num_tokens=1)
                yield landed
            await self.leave([call for call in landed if not call.is_over])
            await self.back()

    @contextlib.asynccontextmanager
    async def staying_on_p(self, count: int) -> AsyncIterator[None]:
        """So many more requests, each with a block of P: computed, and waiting for D, which is full. They leave at the
        end."""
        async with self.sent([STAYS] * count) as offered:
            with self._staying(Standing(num_landed=self.staying.num_landed, num_offered=count)):
                await self.see(offered, self.staying.is_all, num_tokens=1)
                yield
            await self.leave(offered)
            await self.back()

    async def release(self, landed: Sequence[Leaver]) -> None:
        """Have those of `staying_on_d` leave now."""
        self.staying = Standing(num_landed=self.staying.num_landed - len(landed))
        await self.leave(landed)

    async def see(self, leavers: Sequence[Leaver], condition: Condition | None = None, *, num_tokens: int = 0) -> None:
        """They are where they are to be when they leave: the nodes say so, and each has got so many tokens, or more.

        Raises: Missed.
        """
        streamed = [leaver for leaver in leavers if leaver.is_streamed]
        await asyncio.gather(*(leaver.has_tokens(num_tokens) for leaver in streamed))
        if condition is not None:
            await self.cluster.until(condition, [*leavers, *self.neighbours.calls])
        self._seen_after_s = time.monotonic() - self._sent_at

    async def leave(self, leavers: Sequence[Leaver], *, may_end: bool = False) -> None:
        """All go. `may_end`: they may be too late."""
        codes = await asyncio.gather(*(leaver.leave() for leaver in leavers))
        for leaver, code in zip(leavers, codes, strict=True):
            assert code is leaver.way.code or (may_end and code is grpc.StatusCode.OK), (leaver.way, code)
        self._left_at = time.monotonic()
        self.num_left += len(leavers)

    async def back(self, is_back: Condition | None = None) -> View:
        """Everything that those who left had has come back: everywhere, unless `is_back` says where."""
        view = await self.cluster.until(is_back or self.staying.is_all, self.neighbours.calls, within_s=BACK_S)
        if self._left_at is not None:
            self.longest_s = max(self.longest_s, time.monotonic() - self._left_at)
            self._left_at = None
        return view

    @contextlib.contextmanager
    def _staying(self, standing: Standing) -> Iterator[None]:
        before, self.staying = self.staying, standing
        try:
            yield
        finally:
            self.staying = before
