"""Closed and open loops in virtual time."""

import itertools
from collections.abc import AsyncIterator

import pytest
from support.virtual_timer import VirtualTimer

from kvrelay.cli.bench_statistics import Record
from kvrelay.cli.bench_workload import Prompt
from kvrelay.cli.client import Piece, Usage
from kvrelay.cli.load import Load, within
from kvrelay.engine.errors import RemoteError


def make_prompt(index: int) -> Prompt:
    return Prompt(index=index, token_ids=(1, 2, 3), max_tokens=2)


class Server:
    """Answers with two tokens: one after half of `seconds`, one at their end."""

    def __init__(self, timer: VirtualTimer, seconds: float) -> None:
        self.timer = timer
        self.seconds = seconds
        self.begun: list[int] = []
        self.fails: dict[int, str] = {}
        self.stops_short: set[int] = set()
        self.blocks_client_s: dict[int, float] = {}
        self.num_running = 0
        self.most_running = 0

    async def ask(self, prompt: Prompt) -> AsyncIterator[Piece]:
        self.begun.append(prompt.index)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.timer.advance(self.blocks_client_s.get(prompt.index, 0.0))  # the client's one thread, before it goes on
        try:
            await self.timer.sleep(self.seconds / 2)
            if prompt.index in self.fails:
                raise RemoteError(self.fails[prompt.index], "as asked", True)
            yield Piece(token_ids=(7,))
            await self.timer.sleep(self.seconds / 2)
            yield Piece(token_ids=(8,))
            if prompt.index not in self.stops_short:
                usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
                yield Piece(finish_reason="length", usage=usage)
        finally:
            self.num_running -= 1


def by_index(load: Load) -> list[Record]:
    return sorted(load.records, key=lambda record: record.index)


def test_an_open_loop_waits_for_no_answer() -> None:
    timer = VirtualTimer()
    server = Server(timer, seconds=100)
    load = Load(server.ask, make_prompt, timer)
    timer.run(load.open_loop([0.5, 1.0, 4.0]))
    assert server.most_running == 3
    assert [record.sent_s for record in by_index(load)] == [0.5, 1.0, 4.0]
    assert [record.ttft_s for record in load.records] == [50, 50, 50]
    assert [record.end_to_end_s for record in load.records] == [100, 100, 100]


def test_a_request_that_the_client_is_late_to_send_counts_from_its_schedule() -> None:
    timer = VirtualTimer()
    server = Server(timer, seconds=2)
    server.blocks_client_s = {0: 5.0}  # request 0 keeps the client from sending 1 and 2 in time
    load = Load(server.ask, make_prompt, timer)
    timer.run(load.open_loop([1.0, 2.0, 3.0, 20.0]))
    late = [record.lateness_s for record in by_index(load)]
    assert late == [0, 4, 3, 0]
    assert [record.ttft_s for record in by_index(load)] == [6, 5, 4, 1]
    assert [record.end_to_end_s for record in by_index(load)] == [7, 6, 5, 2]


def test_a_closed_loop_has_so_many_under_way_and_no_more() -> None:
    timer = VirtualTimer()
    server = Server(timer, seconds=10)
    load = Load(server.ask, make_prompt, timer)
    timer.run(load.closed_loop(range(5), concurrency=2))
    assert server.begun == [0, 1, 2, 3, 4]
    assert server.most_running == 2
    assert [record.scheduled_s for record in by_index(load)] == [0, 0, 10, 10, 20]
    assert [record.lateness_s for record in load.records] == [0] * 5


def test_more_users_than_prompts_leave_some_with_nothing_to_do() -> None:
    timer = VirtualTimer()
    load = Load(Server(timer, 1).ask, make_prompt, timer)
    timer.run(load.closed_loop(range(2), concurrency=8))
    assert len(load.records) == 2


def test_a_closed_loop_begins_nothing_after_its_time_and_lets_the_rest_end() -> None:
    timer = VirtualTimer()
    load = Load(Server(timer, 10).ask, make_prompt, timer)
    timer.run(load.closed_loop(itertools.count(), concurrency=2, duration_s=25))
    assert [record.scheduled_s for record in load.records] == [0, 0, 10, 10, 20, 20]
    assert max(record.end_s for record in load.records) == 30


@pytest.mark.parametrize(
    ("num_prompts", "duration_s", "kept"), [(2, 100, [1, 2]), (0, 3, [1, 2]), (0, 3.5, [1, 2, 3]), (5, 2.5, [1, 2])]
)
def test_an_open_loop_ends_with_its_prompts_or_its_time(num_prompts: int, duration_s: float, kept: list[int]) -> None:
    assert list(within(map(float, itertools.count(1)), num_prompts, duration_s)) == kept


def test_a_failed_request_is_a_record_and_stops_no_other() -> None:
    timer = VirtualTimer()
    server = Server(timer, seconds=10)
    server.fails, server.stops_short = {1: "RESOURCE_EXHAUSTED"}, {2}
    ended = []
    load = Load(server.ask, make_prompt, timer, on_end=lambda: ended.append(len(load.records)))
    timer.run(load.closed_loop(range(4), concurrency=1))
    first, failed, cut, last = load.records
    assert [record.succeeded for record in load.records] == [True, False, False, True]
    assert (failed.error, failed.error_message, failed.retryable) == ("RESOURCE_EXHAUSTED", "as asked", True)
    assert (failed.message_s, failed.end_s) == ((), 15)
    assert (cut.error, cut.num_output_tokens) == ("UNAVAILABLE", 2)
    assert (first.num_input_tokens, first.num_output_tokens, first.num_cached_tokens) == (3, 2, 1)
    assert last.scheduled_s == 25
    assert ended == [1, 2, 3, 4]
