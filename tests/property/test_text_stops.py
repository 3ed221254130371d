"""Stop strings against a naive reader of the whole text, for any tokens, stop strings and cuts into deltas.

The reader finds stop strings with `str.find` over growing beginnings of the text; what text each token brings is the
detokenizer's word, which has an oracle of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given, settings, strategies as st
from support.tiny_tokenizers import byte_fallback, byte_level

from kvrelay.engine.pieces import byte_level_alphabet
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.detokenizer import Detokenizer, OutputText, StopStrings
from kvrelay.router.tokenizer import Tokenizer

SERVED = [Tokenizer(byte_level()), Tokenizer(byte_fallback())]
CHARACTER_OF = {byte: character for character, byte in byte_level_alphabet().items()}
# Few letters, so that stop strings overlap; characters of several tokens; what broken bytes become.
LETTERS = ["a", "b", "aa", "ab", " ", "é", "😀", "ไ", "\ufffd"]
letters = st.sampled_from(LETTERS) | st.sampled_from("ab")


@st.composite
def stop_strings(draw: st.DrawFn) -> list[str]:
    """Often one is the beginning, the end or the middle of another."""
    stops = draw(st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), min_size=1, max_size=3))
    parts = {stop[start:end] for stop in stops for end in range(1, len(stop) + 1) for start in range(end)}
    return stops + draw(st.lists(st.sampled_from(sorted(parts)), max_size=2))


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    if tokenizer is SERVED[0]:
        return [byte_level().get_vocab()[CHARACTER_OF[value]] for value in data]
    return [byte_fallback().get_vocab()[f"<0x{value:02X}>"] for value in data]


@dataclass(frozen=True)
class Case:
    """A choice's output: its tokens, its parameters, how it would end, and where it is cut into deltas."""

    tokenizer: Tokenizer
    token_ids: list[int]
    sampling: SamplingParams
    reason: FinishReason
    deltas: list[list[int]]

    def texts(self) -> list[str]:
        """What each token brings, the last one with what the end adds."""
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=True)
        texts = [detokenizer.feed(token_id) for token_id in self.token_ids]
        if self.reason is FinishReason.STOP and not self.sampling.include_stop_str_in_output:
            detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=True)
            texts = [*map(detokenizer.feed, self.token_ids[:-1]), ""]
        return [*texts[:-1], texts[-1] + detokenizer.flush()]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Texts of beginnings of their stop strings and of stop strings, as they are and with bytes lost, in any tokens."""
    stops = draw(stop_strings())
    beginnings = [stop[:end] for stop in stops for end in range(1, len(stop) + 1)]
    parts = [part.encode() for part in draw(st.lists(st.sampled_from([*beginnings, *LETTERS]), max_size=6))]
    parts = [part[: len(part) - draw(st.sampled_from([0, 0, 0, 1]))] for part in parts]
    if draw(st.booleans()):  # the output ends inside a character, and that may complete a stop string
        parts.append("😀".encode()[:2])
        stops.append(draw(st.sampled_from(["", *beginnings])) + "\ufffd")
    tokenizer = draw(st.sampled_from(SERVED))
    token_ids = [token_id for part in parts for token_id in ids_of(tokenizer, part)]
    if tokenizer is SERVED[0] and draw(st.booleans()):
        token_ids = byte_level().encode("".join(part.decode("utf-8", "ignore") for part in parts)).ids
    token_ids = token_ids or [draw(st.integers(0, 300))]
    sampling = SamplingParams(
        max_tokens=100,
        seed=0,
        stop=tuple(stops),
        min_tokens=draw(st.just(0) | st.integers(0, len(token_ids))),
        include_stop_str_in_output=draw(st.booleans()),
    )
    places = sorted(draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    deltas = [token_ids[start:end] for start, end in zip([0, *places], [*places, len(token_ids)], strict=True)]
    reason = draw(st.sampled_from(FinishReason)) if deltas[-1] else FinishReason.LENGTH
    return Case(tokenizer, token_ids, sampling, reason, deltas)


def read(texts: Sequence[str], sampling: SamplingParams) -> tuple[str, int, bool]:
    """The text, how many tokens count, and whether a stop string ended it."""
    whole, num_read = "".join(texts), 0
    for num_tokens, text in enumerate(texts, 1):
        for end in range(num_read + 1, num_read + len(text) + 1):
            starts = [end - len(stop) for stop in sampling.stop if whole[:end].find(stop, max(0, end - len(stop))) >= 0]
            if starts and num_tokens >= sampling.min_tokens:
                return whole[: end if sampling.include_stop_str_in_output else min(starts)], num_tokens, True
        num_read += len(text)
    return whole, len(texts), False


@settings(deadline=None, max_examples=400)
@given(cases())
def test_a_text_ends_at_its_first_stop_string_and_is_all_there_until_then(case: Case) -> None:
    """A14, D08: nothing lost, nothing doubled, one finish, whatever the deltas."""
    output, shown, num_tokens, reasons = OutputText(case.tokenizer, case.sampling), "", 0, []
    for i, delta in enumerate(case.deltas):
        piece = output.feed(delta, case.reason if i == len(case.deltas) - 1 else None)
        shown, num_tokens = shown + piece.text, num_tokens + piece.num_tokens
        if piece.finish_reason is not None:
            reasons.append(piece.finish_reason)
            break
    text, num_counted, is_stopped = read(case.texts(), case.sampling)
    told = FinishReason.LENGTH if case.reason is FinishReason.LENGTH and not is_stopped else FinishReason.STOP
    assert (shown, num_tokens, reasons) == (text, num_counted, [told])


@settings(deadline=None, max_examples=400)
@given(cases())
def test_no_more_is_held_back_than_may_begin_a_stop_string(case: Case) -> None:
    output, detokenizer = (
        OutputText(case.tokenizer, case.sampling),
        Detokenizer(case.tokenizer, skip_special_tokens=True),
    )
    shown = known = ""
    for token_id in case.token_ids:
        piece = output.feed([token_id], None)
        shown, known = shown + piece.text, known + detokenizer.feed(token_id)
        if piece.finish_reason is not None:
            return
        held = known.removeprefix(shown)
        assert known == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in case.sampling.stop)


@settings(deadline=None)
@given(stop_strings(), st.lists(st.sampled_from(LETTERS), max_size=12).map("".join))
@example(["aab"], "aaab")
@example(["abab", "ba"], "abaabab")
def test_a_state_is_the_longest_end_that_begins_a_stop_string(stops: list[str], text: str) -> None:
    automaton, state = StopStrings(stops), 0
    for end, character in enumerate(text, 1):
        state = automaton.advance(state, character)
        ends = [text[start:end] for start in range(end + 1)]
        assert automaton.num_held[state] == max(len(e) for e in ends if any(stop.startswith(e) for stop in stops))
        assert automaton.length_found[state] == max((len(e) for e in ends if e in stops), default=0)
