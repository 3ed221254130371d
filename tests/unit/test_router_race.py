"""What two legs say of one output, in every order that the network can make of it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from kvrelay.engine.errors import Internal, InvalidArgument, KvrelayError, RemoteError, TransferFailed, Unavailable
from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.request import FinishReason, Logprobs, Request, RequestKey, SamplingParams
from kvrelay.router.race import Race

KEY = RequestKey("r", 0)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
PROMPT = (3, 1, 4)


def race(*, whole: bool = False, max_tokens: int = 8, prompt: Sequence[int] = PROMPT, **sampling: int) -> Race:
    params = SamplingParams(max_tokens=max_tokens, seed=0, **sampling)
    legs = {"d": Leg.WHOLE} if whole else {"p": Leg.PREFILL, "d": Leg.DECODE}
    return Race(legs, Request(key=KEY, prompt_token_ids=tuple(prompt), sampling=params))


def said(*token_ids: int, first: int = 0, **more: object) -> Delta:
    return Delta(key=KEY, first_token_index=first, token_ids=token_ids, **more)  # type: ignore[arg-type]


def likely(*token_ids: int, k: int = 1) -> tuple[Logprobs, ...]:
    """Log-probabilities as a node says them: each token, and k others."""
    return tuple(
        Logprobs((token_id, *range(k)), tuple(-float(token_id + i) for i in range(1 + k))) for token_id in token_ids
    )


def of_prompt(start: int, end: int, k: int = 1) -> dict[str, object]:
    """What a delta says of prompt tokens [start, end)."""
    entries = (Logprobs(), *likely(*PROMPT[1:], k=k))
    return {"first_prompt_index": start, "prompt_logprobs": entries[start:end]}


@dataclass
class Taken:
    """All that was ever taken of a race."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def take_from(self, merged: Race) -> "Taken":
        first, logprobs = merged.take_prompt_logprobs()
        if logprobs:
            assert first == len(self.prompt_logprobs)
            assert not self.tokens
            self.prompt_logprobs += logprobs
        for new in merged.take():
            assert new.choice not in self.finish_reasons
            tokens = self.tokens.setdefault(new.choice, [])
            assert new.first_index == len(tokens)
            assert new.token_ids or new.finish_reason is not None
            tokens += new.token_ids
            self.logprobs.setdefault(new.choice, []).extend(new.logprobs)
            if new.finish_reason is not None:
                self.finish_reasons[new.choice] = new.finish_reason
        return self


def taken(merged: Race) -> tuple[list[int], FinishReason | None]:
    """Tokens and end of the only choice."""
    found = Taken().take_from(merged)
    return found.tokens.get(0, []), found.finish_reasons.get(0)


def test_each_token_counts_once_whichever_leg_is_first() -> None:
    """A14."""
    prefill = ("p", said(5, ended=True))
    decode = (("d", said(5, 6)), ("d", said(7, first=2, finish_reason=LENGTH, ended=True)))
    for order in ((prefill, *decode), (decode[0], prefill, decode[1]), (*decode, prefill)):
        merged = race()
        for epoch, delta in order:
            merged.receive(epoch, delta)
        assert taken(merged) == ([5, 6, 7], LENGTH)
        assert merged.is_over
        assert not merged.open_legs


def test_tokens_and_the_end_are_taken_once() -> None:
    merged = race(whole=True)
    merged.receive("d", said(5, 6))
    ((new),) = merged.take()
    assert (new.first_index, new.token_ids, new.finish_reason) == (0, [5, 6], None)
    assert merged.take() == []
    merged.receive("d", said(6, 7, first=1))
    ((new),) = merged.take()
    assert (new.first_index, new.token_ids, new.finish_reason) == (2, [7], None)
    merged.receive("d", said(first=3, finish_reason=STOP))
    ((new),) = merged.take()
    assert (new.first_index, new.token_ids, new.finish_reason) == (3, [], STOP)
    assert merged.take() == []


def test_a_first_token_that_ends_the_request_needs_nothing_of_the_decode_node() -> None:
    """A12, A13: in both orders, and with the decode leg's quiet end first."""
    for quiet_end_first in (False, True):
        merged = race()
        if quiet_end_first:
            merged.receive("d", said(ended=True))
            assert not merged.is_over
        merged.receive("p", said(5, finish_reason=STOP, ended=True))
        assert taken(merged) == ([5], STOP)
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
    assert taken(merged) == ([5, 6], LENGTH)


def test_a_prefill_node_lost_after_the_decode_node_told_the_token_is_no_loss() -> None:
    merged = race()
    merged.receive("d", said(5, 6))
    merged.lose("p", Unavailable("lost"))
    assert not merged.is_over


def test_a_prefill_node_lost_before_it_has_told_every_choices_token_is_a_loss() -> None:
    merged = race(n=2)
    merged.receive("p", said(5))
    merged.lose("p", Unavailable("lost"))
    assert isinstance(merged.error, Unavailable)
    merged = race(n=2)
    merged.receive("p", said(5))
    merged.stop(1)
    merged.lose("p", Unavailable("lost"))
    assert not merged.is_over


def test_a_prefill_node_lost_before_it_has_told_the_prompts_logprobs_is_a_loss() -> None:
    """A15."""
    merged = race(prompt_logprobs=1)
    merged.receive("p", said(**of_prompt(0, 2)))
    merged.receive("d", said(5, 6))
    merged.lose("p", Unavailable("lost"))
    assert isinstance(merged.error, Unavailable)
    merged = race(prompt_logprobs=1)
    merged.receive("p", said(5, **of_prompt(0, 3)))
    merged.lose("p", Unavailable("lost"))
    assert not merged.is_over


def test_a_decode_node_lost_at_any_time_before_the_end_fails_the_request() -> None:
    for tokens in ((), (5,), (5, 6)):
        merged = race()
        merged.receive("d", said(*tokens))
        merged.lose("d", Unavailable("gone"))
        assert isinstance(merged.error, Unavailable)
        assert taken(merged) == (list(tokens), None)


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
    assert taken(merged) == ([5], STOP)
    assert merged.error is None
    assert not merged.receive("d", said(7))
    assert not merged.receive("stranger", said(7))


def test_a_choice_that_the_router_stopped_says_nothing_more_and_the_others_go_on() -> None:
    merged = race(n=2)
    merged.receive("d", said(5, 6))
    merged.receive("d", said(7, choice=1))
    found = Taken().take_from(merged)
    merged.receive("d", said(8, first=1, choice=1))
    assert merged.stop(1)
    assert not merged.stop(1)
    merged.receive("d", said(9, first=2, choice=1, finish_reason=LENGTH))
    merged.receive("d", said(9, first=7, choice=1))  # whatever it is: nobody looks at it
    found.take_from(merged)
    assert (found.tokens, found.finish_reasons, merged.is_over) == ({0: [5, 6], 1: [7]}, {}, False)
    merged.receive("d", said(7, first=2, finish_reason=STOP, ended=True))
    found.take_from(merged)
    assert (found.tokens[0], found.finish_reasons, merged.is_over) == ([5, 6, 7], {0: STOP}, True)


def test_the_nodes_are_not_at_a_choice_that_they_ended_themselves() -> None:
    merged = race(n=2)
    merged.receive("d", said(5, finish_reason=STOP))
    assert not merged.stop(0)
    assert merged.take() == []


def test_no_token_and_no_end_comes_before_all_of_the_prompts_logprobs() -> None:
    """A15: the decode leg is done before the prefill leg's word arrives, which comes in pieces, one of them twice."""
    merged = race(prompt_logprobs=1, logprobs=0)
    merged.receive("d", said(5, 6, logprobs=likely(5, 6, k=0), finish_reason=LENGTH, ended=True))
    merged.receive("p", said(**of_prompt(0, 2)))
    assert merged.take_prompt_logprobs() == (0, [Logprobs(), *likely(1)])
    assert not merged.is_over
    merged.receive("p", said(**of_prompt(1, 2)))
    assert merged.take_prompt_logprobs() == (2, [])
    assert merged.take() == []
    merged.receive("p", said(5, logprobs=likely(5, k=0), ended=True, **of_prompt(1, 3)))
    assert merged.is_over
    assert merged.take() == []  # their turn is first
    assert merged.take_prompt_logprobs() == (2, list(likely(4)))
    ((new),) = merged.take()
    assert (new.token_ids, tuple(new.logprobs), new.finish_reason) == ([5, 6], likely(5, 6, k=0), LENGTH)


def test_logprobs_of_a_long_prompt_are_taken_in_pieces() -> None:
    length = 2500
    merged = race(whole=True, prompt=range(length), prompt_logprobs=0)
    entries = (Logprobs(), *likely(*range(1, length), k=0))
    merged.receive("d", said(5, prompt_logprobs=entries))
    pieces = []
    while (piece := merged.take_prompt_logprobs())[1]:
        pieces.append(piece)
    assert [(first, len(part)) for first, part in pieces] == [(0, 1024), (1024, 1024), (2048, 452)]
    assert tuple(entry for _, part in pieces for entry in part) == entries
    assert [new.token_ids for new in merged.take()] == [[5]]


@pytest.mark.parametrize(
    "deltas",
    [
        [("p", said(6, first=1))],  # a gap
        [("d", said(5, 7)), ("d", said(9, first=3))],
        [("p", said(5)), ("d", said(6, 7))],  # the legs differ
        [("d", said(*range(9)))],  # more than was asked for
        [("d", said(5, choice=1))],
        [("d", said(choice=2**32 - 1))],
        [("d", said(5, choice=-1))],
        [("d", said(5, 6)), ("p", said(5, finish_reason=STOP))],  # a finish in the middle
        [("p", said(ended=True)), ("d", said(ended=True))],  # ends without an output
        [("d", said(ended=True)), ("p", said(5, ended=True))],
        [("d", said(5, 6)), ("d", said(ended=True))],
        [("d", said(5, logprobs=likely(5)))],  # nobody asked for them
        [("p", said(**of_prompt(0, 1)))],
    ],
)
def test_contradictions_are_our_own_bugs_and_never_tokens(deltas: list[tuple[str, Delta]]) -> None:
    merged = race()
    for epoch, delta in deltas:
        merged.receive(epoch, delta)
    assert isinstance(merged.error, Internal)


@pytest.mark.parametrize(
    "deltas",
    [
        [("d", said(5, choice=2))],
        [("d", said(5, choice=1, logprobs=likely(5, k=2))), ("d", said(ended=True))],  # an end without the other choice
        [("d", said(ended=True)), ("p", said(5, logprobs=likely(5, k=2))), ("p", said(ended=True))],
        [("d", said(5))],  # not one a token
        [("d", said(logprobs=likely(5, k=2)))],
        [("d", said(5, 6, logprobs=likely(5, k=2)))],
        [("d", said(5, logprobs=likely(5, 6, k=2)))],
        [("d", said(5, logprobs=likely(6, k=2)))],  # of another token
        [("d", said(5, logprobs=likely(5, k=1)))],  # of fewer or more than were asked for
        [("d", said(5, logprobs=likely(5, k=64)))],
        [("d", said(5, logprobs=(Logprobs(),)))],
        [("d", said(5, logprobs=(Logprobs((5, 1, 2), (-1.0, -2.0)),)))],  # two lists that do not match
        [("d", said(5, logprobs=(Logprobs((), (-1.0, -2.0, -3.0)),)))],
        [("p", said(**of_prompt(1, 2)))],  # a gap
        [("p", said(**of_prompt(0, 1))), ("p", said(**of_prompt(2, 3)))],
        [("p", said(**of_prompt(0, 3, k=2)))],
        [("p", said(first_prompt_index=0, prompt_logprobs=likely(*PROMPT)))],  # something before the first token
        [("p", said(first_prompt_index=0, prompt_logprobs=(Logprobs(), *likely(*PROMPT))))],  # behind the last
        [("p", said(first_prompt_index=2**32 - 1, prompt_logprobs=likely(4)))],
        [("p", said(**of_prompt(0, 1))), ("p", said(first_prompt_index=1, prompt_logprobs=likely(9)))],
        [("p", said(**of_prompt(0, 2))), ("p", said(ended=True))],  # an end before the last
    ],
)
def test_what_a_node_says_of_choices_and_logprobs_must_fit_what_was_asked_for(deltas: list[tuple[str, Delta]]) -> None:
    merged = race(n=2, logprobs=2, prompt_logprobs=1)
    for epoch, delta in deltas:
        merged.receive(epoch, delta)
    assert isinstance(merged.error, Internal)
    assert merged.take() == []


def test_the_first_report_of_each_leg_is_kept() -> None:
    merged = race()
    merged.receive("p", said(5, report=LegReport(queue_ms=1)))
    merged.receive("d", said(5, 6, report=LegReport(queue_ms=2)))
    merged.receive("d", said(7, first=2, report=LegReport(queue_ms=3)))
    assert {leg: report.queue_ms for leg, report in merged.reports.items()} == {Leg.PREFILL: 1, Leg.DECODE: 2}


def decoded_all() -> tuple[Race, Taken]:
    """A race whose decode node has told everything, before the prefill node's first word."""
    merged = race()
    merged.receive("d", said(5, 6, 7, finish_reason=LENGTH, ended=True))
    assert merged.is_over
    found = Taken().take_from(merged)
    assert (found.tokens, found.finish_reasons) == ({0: [5, 6, 7]}, {})
    return merged, found


def test_the_last_end_waits_for_the_prefill_nodes_first_word_and_the_tokens_do_not() -> None:
    merged, found = decoded_all()
    assert merged.take() == []
    merged.receive("p", said(5, report=LegReport(num_cached_tokens=16)))
    assert found.take_from(merged).finish_reasons == {0: LENGTH}
    assert merged.reports[Leg.PREFILL].num_cached_tokens == 16
    assert merged.take() == []


def test_whatever_ends_the_prefill_leg_gives_out_an_answer_that_is_complete() -> None:
    ways: tuple[Callable[[Race], object], ...] = (
        lambda merged: merged.receive("p", said(ended=True)),
        lambda merged: merged.receive("p", said(error=Internal("failed"))),
        lambda merged: merged.lose("p", Unavailable("lost")),
        lambda merged: merged.abort(Unavailable("shutting down")),
    )
    for end_prefill in ways:
        merged, found = decoded_all()
        end_prefill(merged)
        assert found.take_from(merged).finish_reasons == {0: LENGTH}
        assert merged.error is None


def test_log_probabilities_of_the_prompt_are_not_the_word_that_the_last_end_waits_for() -> None:
    merged, found = race(prompt_logprobs=1), Taken()
    merged.receive("d", said(5, finish_reason=LENGTH, ended=True))
    merged.receive("p", said(**of_prompt(0, 3)))
    assert found.take_from(merged).finish_reasons == {}
    merged.receive("p", said(5, report=LegReport(num_cached_tokens=16), ended=True))
    assert found.take_from(merged).finish_reasons == {0: LENGTH}


def test_of_two_choices_the_one_that_ends_first_waits_for_nobody() -> None:
    merged = race(n=2)
    merged.receive("d", said(5, finish_reason=STOP))
    found = Taken().take_from(merged)
    assert found.finish_reasons == {0: STOP}
    merged.receive("d", said(6, choice=1, finish_reason=LENGTH, ended=True))
    assert found.take_from(merged).finish_reasons == {0: STOP}
    merged.receive("p", said(5))
    assert found.take_from(merged).finish_reasons == {0: STOP, 1: LENGTH}


def test_what_the_router_stops_waits_for_nobody() -> None:
    """Not even for an end of the node's own that comes later."""
    merged = race(n=2)
    merged.receive("d", said(5))
    merged.receive("d", said(6, choice=1))
    found = Taken().take_from(merged)
    merged.stop(0)
    merged.receive("d", said(7, choice=1, first=1, finish_reason=LENGTH, ended=True))
    assert found.take_from(merged).finish_reasons == {1: LENGTH}


def test_a_node_that_does_both_legs_holds_nothing_back() -> None:
    merged = race(whole=True)
    merged.receive("d", said(5, finish_reason=LENGTH))
    assert taken(merged) == ([5], LENGTH)


def interleavings(prefill: Sequence[Delta], decode: Sequence[Delta]) -> Iterable[list[tuple[str, Delta]]]:
    """Every order in which two streams can arrive, each in its own order."""
    places = range(len(prefill) + len(decode))
    for chosen in itertools.combinations(places, len(prefill)):
        of_prefill, of_decode = iter(prefill), iter(decode)
        yield [("p", next(of_prefill)) if place in chosen else ("d", next(of_decode)) for place in places]


def test_every_order_of_two_good_legs_gives_the_same_output() -> None:
    """A14: all interleavings of what each node says in its own order, with repeats."""
    prefill = [said(5), said(5), said(ended=True)]
    decode = [said(5, 6), said(6, 7, first=1), said(8, first=3, finish_reason=LENGTH), said(ended=True)]
    for order in interleavings(prefill, decode):
        merged = race()
        for epoch, delta in order:
            merged.receive(epoch, delta)
        assert taken(merged) == ([5, 6, 7, 8], LENGTH)
        assert merged.error is None
        assert not merged.open_legs


def test_no_order_of_two_legs_gives_out_the_end_without_the_prefill_nodes_report() -> None:
    prefill = [said(5, report=LegReport(num_cached_tokens=16)), said(ended=True)]
    decode = [said(5, 6), said(7, first=2, finish_reason=LENGTH, ended=True)]
    for order in interleavings(prefill, decode):
        merged, found = race(), Taken()
        for epoch, delta in order:
            merged.receive(epoch, delta)
            found.take_from(merged)
            assert not found.finish_reasons or Leg.PREFILL in merged.reports
        assert (found.tokens, found.finish_reasons) == ({0: [5, 6, 7]}, {0: LENGTH})


@pytest.mark.parametrize("takes_all_the_time", [True, False])
@pytest.mark.parametrize("second_ends_on_prefill", [True, False])
def test_every_order_of_two_legs_with_two_choices_and_logprobs_gives_the_script(
    second_ends_on_prefill: bool, takes_all_the_time: bool
) -> None:
    """A14, A15: tokens, log-probabilities and ends of both choices, and the prompt's, whatever the order."""

    def with_logprobs(*token_ids: int, **more: object) -> Delta:
        return said(*token_ids, logprobs=likely(*token_ids), **more)

    ends = {"finish_reason": STOP} if second_ends_on_prefill else {}
    prefill = [
        said(**of_prompt(0, 1)),
        said(**of_prompt(1, 3)),
        with_logprobs(5),
        with_logprobs(7, choice=1, ended=True, **ends),
    ]
    decode = [with_logprobs(5, 6), with_logprobs(6, first=1, finish_reason=LENGTH)]
    script = {0: [5, 6], 1: [7]}
    if not second_ends_on_prefill:
        decode.insert(1, with_logprobs(7, choice=1))
        decode.insert(3, with_logprobs(8, first=1, choice=1, finish_reason=STOP))
        script[1] = [7, 8]
    decode.append(said(ended=True))
    for order in interleavings(prefill, decode):
        merged, found = race(n=2, logprobs=1, prompt_logprobs=1), Taken()
        for epoch, delta in order:
            assert merged.receive(epoch, delta)
            if takes_all_the_time:
                found.take_from(merged)
        found.take_from(merged)
        assert merged.error is None
        assert merged.is_over
        assert not merged.open_legs
        assert found.tokens == script
        assert found.finish_reasons == {0: LENGTH, 1: STOP}
        assert {choice: tuple(entries) for choice, entries in found.logprobs.items()} == {
            choice: likely(*token_ids) for choice, token_ids in script.items()
        }
        assert found.prompt_logprobs == [Logprobs(), *likely(*PROMPT[1:])]
