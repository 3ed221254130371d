"""What two legs say of one output, in every order that the network can make of it."""

import itertools

import pytest

from kvrelay.engine.errors import Internal, InvalidArgument, KvrelayError, RemoteError, TransferFailed, Unavailable
from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.request import FinishReason, RequestKey
from kvrelay.router.race import Race

KEY = RequestKey("r", 0)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def race(*, whole: bool = False, max_tokens: int = 8) -> Race:
    return Race({"d": Leg.WHOLE} if whole else {"p": Leg.PREFILL, "d": Leg.DECODE}, max_tokens)


def said(*token_ids: int, first: int = 0, **more: object) -> Delta:
    return Delta(key=KEY, first_token_index=first, token_ids=token_ids, **more)  # type: ignore[arg-type]


def test_each_token_counts_once_whichever_leg_is_first() -> None:
    """A14."""
    prefill = ("p", said(5, ended=True))
    decode = (("d", said(5, 6)), ("d", said(7, first=2, finish_reason=LENGTH, ended=True)))
    for order in ((prefill, *decode), (decode[0], prefill, decode[1]), (*decode, prefill)):
        merged = race()
        for epoch, delta in order:
            merged.receive(epoch, delta)
        assert merged.take() == (0, [5, 6, 7])
        assert merged.finish_reason is LENGTH
        assert not merged.open_legs


def test_tokens_are_taken_once() -> None:
    merged = race(whole=True)
    merged.receive("d", said(5, 6))
    assert merged.take() == (0, [5, 6])
    assert merged.take() == (2, [])
    merged.receive("d", said(6, 7, first=1))
    assert merged.take() == (2, [7])


def test_a_first_token_that_ends_the_request_needs_nothing_of_the_decode_node() -> None:
    """A12, A13: in both orders, and with the decode leg's quiet end first."""
    for quiet_end_first in (False, True):
        merged = race()
        if quiet_end_first:
            merged.receive("d", said(ended=True))
            assert not merged.is_over
        merged.receive("p", said(5, finish_reason=STOP, ended=True))
        assert merged.finish_reason is STOP
        assert ("d" in merged.open_legs) is not quiet_end_first


def test_a_leg_that_fails_before_the_first_token_fails_the_request() -> None:
    for epoch in "pd":
        merged = race()
        merged.receive(epoch, said(error=TransferFailed("PEER_LOST"), ended=True))
        assert isinstance(merged.error, Unavailable)
        assert "hand-off failed: PEER_LOST" in merged.error.message
        assert len(merged.open_legs) == 1


def test_a_prefill_node_lost_after_its_token_leaves_the_rest_to_the_decode_node() -> None:
    merged = race()
    merged.receive("p", said(5))
    assert merged.lose("p", Unavailable("lost"))
    assert not merged.is_over
    merged.receive("d", said(5, 6, finish_reason=LENGTH, ended=True))
    assert merged.finish_reason is LENGTH


def test_a_prefill_node_lost_after_the_decode_node_told_the_token_is_no_loss() -> None:
    merged = race()
    merged.receive("d", said(5, 6))
    merged.lose("p", Unavailable("lost"))
    assert not merged.is_over


def test_a_decode_node_lost_at_any_time_before_the_end_fails_the_request() -> None:
    for tokens in ((), (5,), (5, 6)):
        merged = race()
        merged.receive("d", said(*tokens))
        merged.lose("d", Unavailable("gone"))
        assert isinstance(merged.error, Unavailable)
        assert merged.take() == (0, list(tokens))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RemoteError("RESOURCE_EXHAUSTED", "full", retryable=True), "UNAVAILABLE"),
        (RemoteError("DEADLINE_EXCEEDED", "late", retryable=False), "DEADLINE_EXCEEDED"),
        (InvalidArgument("prompt", 9, "at most 8"), "INVALID_ARGUMENT"),
        (Internal("bug"), "INTERNAL"),
    ],
)
def test_a_retryable_error_is_unavailable_and_any_other_keeps_its_code(error: KvrelayError, code: str) -> None:
    merged = race()
    merged.receive("p", said(error=error, ended=True))
    assert merged.error is not None
    assert merged.error.code == code


def test_what_comes_after_the_end_changes_nothing() -> None:
    merged = race()
    merged.receive("p", said(5, finish_reason=STOP, ended=True))
    merged.receive("d", said(5, 6, first=0))
    merged.receive("d", said(error=Internal("late"), ended=True))
    assert merged.take() == (0, [5])
    assert merged.error is None
    assert not merged.receive("d", said(7))
    assert not merged.receive("stranger", said(7))


@pytest.mark.parametrize(
    "deltas",
    [
        [("p", said(6, first=1))],  # a gap
        [("d", said(5, 7)), ("d", said(9, first=3))],
        [("p", said(5)), ("d", said(6, 7))],  # the legs differ
        [("d", said(*range(9)))],  # more than was asked for
        [("d", said(5, choice=1))],
        [("d", said(5, 6)), ("p", said(5, finish_reason=STOP))],  # a finish in the middle
        [("p", said(ended=True)), ("d", said(ended=True))],  # ends without an output
        [("d", said(ended=True)), ("p", said(5, ended=True))],
        [("d", said(5, 6)), ("d", said(ended=True))],
    ],
)
def test_contradictions_are_our_own_bugs_and_never_tokens(deltas: list[tuple[str, Delta]]) -> None:
    merged = race()
    for epoch, delta in deltas:
        merged.receive(epoch, delta)
    assert isinstance(merged.error, Internal)


def test_the_first_report_of_each_leg_is_kept() -> None:
    merged = race()
    merged.receive("p", said(5, report=LegReport(queue_ms=1)))
    merged.receive("d", said(5, 6, report=LegReport(queue_ms=2)))
    merged.receive("d", said(7, first=2, report=LegReport(queue_ms=3)))
    assert {leg: report.queue_ms for leg, report in merged.reports.items()} == {Leg.PREFILL: 1, Leg.DECODE: 2}


def test_every_order_of_two_good_legs_gives_the_same_output() -> None:
    """A14: all interleavings of what each node says in its own order, with repeats."""
    prefill = [said(5), said(5), said(ended=True)]
    decode = [said(5, 6), said(6, 7, first=1), said(8, first=3, finish_reason=LENGTH), said(ended=True)]
    places = range(len(prefill) + len(decode))
    for chosen in itertools.combinations(places, len(prefill)):
        merged, of_prefill, of_decode = race(), iter(prefill), iter(decode)
        for place in places:
            merged.receive("p", next(of_prefill)) if place in chosen else merged.receive("d", next(of_decode))
        assert merged.take() == (0, [5, 6, 7, 8])
        assert merged.finish_reason is LENGTH
        assert merged.error is None
        assert not merged.open_legs
