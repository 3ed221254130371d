"""Puts a load on something that answers, and keeps what each request took.

A closed loop has so many users, each of whom asks again when the answer is whole. An open loop sends at times that are
fixed beforehand and never waits for an answer; a request that the client is late to send counts from its time all
the same, else a server that stalls, or a client that cannot keep up, would look fast (coordinated omission).
"""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from kvrelay.cli.bench_statistics import Record
from kvrelay.cli.bench_workload import Prompt
from kvrelay.cli.client import Piece
from kvrelay.engine.clock import Clock, MonotonicClock
from kvrelay.engine.errors import KvrelayError, Unavailable

# Streams one answer. Raises: KvrelayError.
Ask = Callable[[Prompt], AsyncIterator[Piece]]


class Timer(Clock, Protocol):
    """A clock that can be waited for."""

    async def sleep_until(self, moment: float) -> None:
        """Return at `moment` or later; let others run even if it is past."""


class LoopTimer(MonotonicClock):
    """This process's monotonic clock, waited for by the event loop."""

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self.now()))


class Load:
    """One run: collects a record a request, in the order of their ends."""

    def __init__(
        self,
        ask: Ask,
        make_prompt: Callable[[int], Prompt],
        timer: Timer,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._ask = ask
        self._make_prompt = make_prompt
        self._timer = timer
        self._on_end = on_end
        self._started_at = timer.now()
        self.records: list[Record] = []
        self.num_running = 0  # now

    async def closed_loop(self, indices: Iterable[int], concurrency: int, duration_s: float = math.inf) -> None:
        """Ask for these prompts, so many at once. None is begun after `duration_s`."""
        left = iter(indices)

        async def user() -> None:
            for index in left:
                if self._elapsed() >= duration_s:
                    return
                prompt = self._make_prompt(index)
                await self._request(prompt, self._elapsed())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())

    async def open_loop(self, arrivals: Iterable[float]) -> None:
        """Ask for prompt i at arrivals[i], seconds from the start, in ascending order. The iterable must end."""
        async with asyncio.TaskGroup() as group:
            for index, scheduled_s in enumerate(arrivals):
                prompt = self._make_prompt(index)  # before its time, not at it
                await self._timer.sleep_until(self._started_at + scheduled_s)
                group.create_task(self._request(prompt, scheduled_s))

    def _elapsed(self) -> float:
        return self._timer.now() - self._started_at

    async def _request(self, prompt: Prompt, scheduled_s: float) -> None:
        sent_s = self._elapsed()
        self.num_running += 1
        message_s: list[float] = []
        num_output_tokens = 0
        last = Piece()
        error: KvrelayError | None = None
        try:
            async for last in self._ask(prompt):
                if _brings_tokens(last):
                    message_s.append(self._elapsed())
                    num_output_tokens += len(last.token_ids)
            if not last.finish_reason:
                error = Unavailable("the answer stopped before its end")
        except KvrelayError as raised:
            error = raised
        finally:
            self.num_running -= 1
        record = Record(
            index=prompt.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            end_s=self._elapsed(),
            message_s=tuple(message_s),
            num_input_tokens=len(prompt.token_ids),
            # A server over HTTP shows no ids: it counts them.
            num_output_tokens=num_output_tokens or (last.usage.completion_tokens if last.usage else 0),
            max_tokens=prompt.max_tokens,
            num_cached_tokens=last.usage.cached_tokens if last.usage else 0,
            error=error.code if error else "",
            error_message=error.message if error else "",
            retryable=error.retryable if error else False,
            timings=last.timings,
            handoff=last.handoff,
        )
        self.records.append(record)
        self._on_end()


def _brings_tokens(piece: Piece) -> bool:
    """Or only ends the answer, or tells of the prompt. A token may have no text, and a server may show no ids."""
    return bool(piece.token_ids or piece.text) or not (piece.finish_reason or piece.prompt_logprobs)


def within(arrivals: Iterable[float], num_prompts: int, duration_s: float) -> Iterable[float]:
    """The first `num_prompts` (0: any number) of these arrivals that come before `duration_s`."""
    limited = itertools.islice(arrivals, num_prompts or None)
    return itertools.takewhile(lambda moment: moment < duration_s, limited)
