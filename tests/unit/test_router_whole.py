"""Answers in one piece: what comes out, and that nothing is left open behind them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvrelay.engine.errors import Unavailable
from kvrelay.engine.request import FinishReason, Logprobs
from kvrelay.router.api import Output, Summary, Timings, Usage
from kvrelay.router.whole import whole

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
SUMMARY = Summary(
    usage=Usage(prompt_tokens=2, completion_tokens=5, cached_tokens=0),
    timings=Timings(**dict.fromkeys(Timings.__dataclass_fields__, 1.0)),
    handoff=None,
)
A, B, C = (Logprobs((i,), (-float(i),)) for i in range(3))
STREAM = (
    Output(choice=0, prompt_logprobs=[Logprobs()]),
    Output(choice=0, prompt_logprobs=[B], first_prompt_index=1),
    Output(choice=0, text="a", token_ids=[1], logprobs=[A]),
    Output(choice=1, text="x", token_ids=[2, 3], logprobs=[B, C]),
    Output(choice=1, text="y", token_ids=[4], first_token_index=2, logprobs=[A], finish_reason=STOP),
    Output(choice=0, text="b", first_token_index=1, token_ids=[5], logprobs=[C]),
    Output(choice=0, text="c", first_token_index=2, finish_reason=LENGTH, summary=SUMMARY),
)


class Source:
    """Gives `STREAM` out, and says whether it was closed; fails behind its end if asked to."""

    def __init__(self, num_outputs: int = len(STREAM), error: Exception | None = None) -> None:
        self.closed = False
        self._num_outputs = num_outputs
        self._error = error

    async def outputs(self) -> AsyncGenerator[Output]:
        try:
            for output in STREAM[: self._num_outputs]:
                yield output
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def test_each_choice_comes_once_and_whole_when_it_has_ended() -> None:
    second, first = [output async for output in whole(Source().outputs())]
    assert second == Output(
        choice=1,
        text="xy",
        token_ids=[2, 3, 4],
        logprobs=[B, C, A],
        prompt_logprobs=[Logprobs(), B],
        finish_reason=STOP,
    )
    assert first == Output(
        choice=0,
        text="abc",
        token_ids=[1, 5],
        logprobs=[A, C],
        prompt_logprobs=[],
        finish_reason=LENGTH,
        summary=SUMMARY,
    )


async def test_whoever_leaves_between_two_choices_leaves_nothing_open() -> None:
    source = Source()
    async with aclosing(whole(source.outputs())) as answers:
        assert (await anext(answers)).choice == 1
    assert source.closed


async def test_an_error_comes_behind_what_had_ended_before_it() -> None:
    source = Source(5, Unavailable("lost"))
    answers = whole(source.outputs())
    assert (await anext(answers)).choice == 1
    with pytest.raises(Unavailable):
        await anext(answers)
    assert source.closed
