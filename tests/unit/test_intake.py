"""The way of a start to the engine thread while its form is compiled."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.oracle import make_request

from kvrelay.engine.errors import InvalidArgument, ResourceExhausted
from kvrelay.engine.legs import Delta, Leg
from kvrelay.engine.request import Request, RequestKey, StructuredKind, StructuredOutput
from kvrelay.node import intake
from kvrelay.node.intake import Intake
from kvrelay.node.report import Start

FORM = StructuredOutput(kind=StructuredKind.REGEX, specification="a+")


@dataclass
class Recorder:
    """What stands behind an intake: compiler, engine thread and core, by what they were asked."""

    error: Exception | None = None
    posted: list[tuple[str, Any]] = field(default_factory=list)
    said: list[Delta] = field(default_factory=list)
    compiled: list[tuple[StructuredOutput, tuple[int, ...]]] = field(default_factory=list)

    def compile(self, form: StructuredOutput, output_ids: tuple[int, ...]) -> str:
        self.compiled.append((form, output_ids))
        if self.error is not None:
            raise self.error
        return "matcher"

    def post(self, message: Any) -> None:
        message()

    def start(self, start: Start) -> None:
        self.posted.append(("start", start))

    def cancel(self, key: RequestKey, choice: int | None) -> None:
        self.posted.append(("cancel", choice))


def make_intake(recorder: Any) -> Intake:
    return Intake(recorder, recorder, recorder, recorder.said.append)


def request(name: str = "r", **more: Any) -> Request:
    return make_request([1, 2], name, structured_output=FORM, **more)


async def settled(made: Intake) -> None:
    while made.num_compiling:  # noqa: ASYNC110  it has no event of its own
        await asyncio.sleep(0)


async def test_a_start_without_a_form_goes_straight_on() -> None:
    recorder = Recorder()
    start = Start(Leg.WHOLE, make_request([1, 2]))
    make_intake(recorder).start(start)
    assert recorder.posted == [("start", start)]


async def test_a_start_comes_with_the_matcher_of_its_output_so_far_and_cancels_of_choices_after_it() -> None:
    recorder = Recorder()
    made = make_intake(recorder)
    start = Start(Leg.WHOLE, request(output=[7, 8]))
    made.start(start)
    made.cancel(start.request.key, 1)
    made.cancel(RequestKey("other", 0))
    assert recorder.posted == [("cancel", None)]
    await settled(made)
    matcher: Any = "matcher"
    assert recorder.compiled == [(FORM, (7, 8))]
    assert recorder.posted[1:] == [("start", replace(start, matcher=matcher)), ("cancel", 1)]
    assert recorder.said == []
    made.close()


async def test_a_start_that_is_cancelled_never_comes() -> None:
    recorder = Recorder()
    made = make_intake(recorder)
    made.start(Start(Leg.WHOLE, request()))
    made.cancel(RequestKey("r", 0))
    assert made.num_compiling == 0
    await asyncio.sleep(0.05)
    assert (recorder.posted, recorder.said) == ([], [])
    made.close()


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidArgument("a", 1, "b"), "INVALID_ARGUMENT"), (ZeroDivisionError(), "INTERNAL")]
)
async def test_a_form_that_cannot_be_compiled_ends_its_own_leg(error: Exception, code: str) -> None:
    recorder = Recorder(error)
    made = make_intake(recorder)
    made.start(Start(Leg.WHOLE, request()))
    await settled(made)
    while not recorder.said:  # noqa: ASYNC110  said a moment after
        await asyncio.sleep(0)
    (delta,) = recorder.said
    assert (delta.key, delta.ended) == (RequestKey("r", 0), True)
    assert delta.error is not None
    assert delta.error.code == code
    assert recorder.posted == []
    made.close()


async def test_no_more_wait_for_the_compiler_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_COMPILING", 2)
    made = make_intake(Recorder())
    for i in range(2):
        made.start(Start(Leg.WHOLE, request(f"r{i}")))
    with pytest.raises(ResourceExhausted, match="2 forms"):
        made.start(Start(Leg.WHOLE, request("r2")))
    made.close()
