"""Incremental text: whole characters, stop strings, stop tokens."""

import itertools
import time

import pytest
from support.tiny_tokenizers import EOS, byte_fallback, byte_level

from kvrelay.engine.pieces import byte_level_alphabet
from kvrelay.engine.request import FinishReason, Request, RequestKey, SamplingParams
from kvrelay.router.detokenizer import Detokenizer, OutputText, Piece, StopStrings, decode, make_output_texts
from kvrelay.router.tokenizer import Tokenizer

BYTE_LEVEL, BYTE_FALLBACK = Tokenizer(byte_level()), Tokenizer(byte_fallback())
CHARACTER_OF = {byte: character for character, byte in byte_level_alphabet().items()}


def byte_ids(text: str) -> list[int]:
    """One byte-level token a byte."""
    ids = [byte_level().token_to_id(CHARACTER_OF[byte]) for byte in text.encode()]
    return [token_id for token_id in ids if token_id is not None]


def output(**sampling: object) -> OutputText:
    return OutputText(BYTE_LEVEL, SamplingParams(max_tokens=100, seed=0, **sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["😀", "ไ", "𠮷", "é", "e\u0301"])
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    """C02."""
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    deltas = [detokenizer.feed(token_id) for token_id in byte_ids(text)]
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6])
def test_a_limit_inside_a_character_shows_one_replacement_at_the_very_end(limit: int) -> None:
    """C03."""
    piece = output().feed(byte_ids("😀😀")[:limit], FinishReason.LENGTH)
    whole, cut = divmod(limit, 4)
    assert piece == Piece("😀" * whole + "\ufffd" * bool(cut), limit, FinishReason.LENGTH)


def test_a_prompt_that_ends_in_half_a_character_shows_nothing_of_itself() -> None:
    """C01: text is a function of the output alone, whatever the prompt ended with."""
    assert output().feed(byte_ids("ok"), FinishReason.LENGTH).text == "ok"


def test_a_sentencepiece_text_keeps_the_space_after_its_prompt_and_loses_it_at_a_texts_start() -> None:
    token_ids = byte_fallback().encode("the", add_special_tokens=False).ids
    continued = Detokenizer(BYTE_FALLBACK, skip_special_tokens=True)
    assert "".join(map(continued.feed, token_ids)) == " the"
    assert decode(BYTE_FALLBACK, token_ids, skip_special_tokens=True) == "the"


def test_special_tokens_show_only_if_asked_for() -> None:
    token_ids = [*byte_level().encode("Rome").ids, byte_level().token_to_id(EOS)]
    assert decode(BYTE_LEVEL, token_ids, skip_special_tokens=True) == "Rome"
    assert decode(BYTE_LEVEL, token_ids, skip_special_tokens=False) == f"Rome{EOS}"


def test_the_token_that_stops_shows_no_text_unless_asked_for() -> None:
    """A12: a stop id may be an ordinary token."""
    token_ids = byte_ids("ab!")
    assert output().feed(token_ids, FinishReason.STOP) == Piece("ab", 3, FinishReason.STOP)
    shown = output(include_stop_str_in_output=True).feed(token_ids, FinishReason.STOP)
    assert shown == Piece("ab!", 3, FinishReason.STOP)


def test_a_stop_string_across_deltas_is_held_back_and_never_shown() -> None:
    text = output(stop=("END",))
    assert text.feed(byte_ids("aE"), None) == Piece("a", 2, None)
    assert text.feed(byte_ids("N"), None) == Piece("", 1, None)
    assert text.feed(byte_ids("Dxy"), None) == Piece("", 1, FinishReason.STOP)


def test_held_back_text_is_shown_when_it_turns_out_to_be_no_stop_string() -> None:
    text = output(stop=("END",))
    assert text.feed(byte_ids("EN"), None).text == ""
    assert text.feed(byte_ids("x"), None).text == "ENx"
    assert text.feed(byte_ids("EN"), FinishReason.LENGTH) == Piece("EN", 2, FinishReason.LENGTH)


def test_a_stop_string_counts_only_if_it_ends_from_min_tokens_on() -> None:
    text = output(stop=("x",), min_tokens=3)
    assert text.feed(byte_ids("xx"), None) == Piece("xx", 2, None)  # neither is held back: it cannot count any more
    assert text.feed(byte_ids("yx"), None) == Piece("y", 2, FinishReason.STOP)


def test_a_stop_string_that_begins_before_min_tokens_is_never_shown() -> None:
    text = output(stop=("END",), min_tokens=3)
    assert text.feed(byte_ids("EN"), None) == Piece("", 2, None)
    assert text.feed(byte_ids("D"), None) == Piece("", 1, FinishReason.STOP)


def test_a_stop_string_that_came_too_early_still_begins_a_longer_one() -> None:
    text = output(stop=("ab", "abc"), min_tokens=3)
    assert text.feed(byte_ids("ab"), None) == Piece("", 2, None)
    assert text.feed(byte_ids("c"), None) == Piece("", 1, FinishReason.STOP)


def test_a_stop_string_between_the_bytes_of_its_neighbours_is_found() -> None:
    text = output(stop=("é",))
    assert text.feed(byte_ids("😀")[:3], None) == Piece("", 3, None)
    assert text.feed([*byte_ids("😀")[3:], *byte_ids("é")[:1]], None) == Piece("😀", 2, None)
    assert text.feed([*byte_ids("é")[1:], *byte_ids("ไ")], None) == Piece("", 1, FinishReason.STOP)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_the_end_of_the_output_completes_is_the_reason(include: bool) -> None:
    """A14: a cut character becomes U+FFFD, which completes the stop string."""
    text = output(stop=("a\ufffd",), include_stop_str_in_output=include)
    assert text.feed(byte_ids("xa😀")[:4], None) == Piece("x", 4, None)
    assert text.feed([], FinishReason.LENGTH) == Piece("a\ufffd" * include, 0, FinishReason.STOP)


def test_a_stop_string_in_the_text_of_the_token_that_stops_is_found_only_where_that_text_shows() -> None:
    token_ids = byte_ids("aEND!")
    assert output(stop=("END!",)).feed(token_ids, FinishReason.STOP).text == "aEND"
    shown = output(stop=("END!", "D"), include_stop_str_in_output=True).feed(token_ids, FinishReason.STOP)
    assert shown == Piece("aEND", 4, FinishReason.STOP)


def test_the_longer_of_two_stop_strings_that_end_together_counts() -> None:
    assert output(stop=("b", "ab")).feed(byte_ids("xab"), None).text == "x"


def test_every_short_stop_string_is_found_wherever_it_ends() -> None:
    """All stop strings of two letters up to length four, in all texts of length seven."""
    stops = ["".join(letters) for size in range(1, 5) for letters in itertools.product("ab", repeat=size)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    for stop, text in itertools.product(stops, texts):
        stops, state, ends = StopStrings([stop]), 0, []
        for end, character in enumerate(text, 1):
            state = stops.advance(state, character)
            ends += [end] * (stops.length_found[state] > 0)
        assert ends == [end for end in range(len(text) + 1) if text[:end].endswith(stop)]


def test_work_per_token_does_not_grow_with_the_output() -> None:
    """Endless broken bytes, and an endless almost-stop of sixteen: a naive window would grow for ever."""
    broken = [byte_level().token_to_id(CHARACTER_OF[0xF0])] * 20_000
    text = output(stop=tuple("a" * (255 - i) + "b" for i in range(16)))
    started = time.monotonic()
    assert text.feed(broken, None).num_tokens == len(broken)
    assert text.feed(byte_ids("a") * 20_000, None).num_tokens == 20_000
    assert time.monotonic() - started < 5  # quadratic: minutes


def test_an_output_begins_its_text_only_after_a_prompt_that_shows_nothing() -> None:
    """A sentencepiece-like tokenizer's space at a text's start is not the model's; unknown ids begin nothing."""
    bos, unknown, the = 1, 999, byte_fallback().token_to_id("▁the")
    for prompt, skip, text in (
        ([bos], True, "the the"),
        ([bos, unknown], True, "the the"),
        ([bos], False, " the the"),  # it shows
        ([bos, the], True, " the the"),
    ):
        sampling = SamplingParams(max_tokens=9, seed=0, skip_special_tokens=skip, n=2)
        request = Request(key=RequestKey("r", 0), prompt_token_ids=tuple(prompt), sampling=sampling)
        for choice in make_output_texts(BYTE_FALLBACK, request):
            assert choice.feed([unknown], None) == Piece("", 1, None)
            assert choice.feed([the, the], None) == Piece(text, 2, None)


def test_an_output_without_text_ends_once_with_nothing() -> None:
    for token_ids in ([], [0], [999]):
        assert output(stop=("x",)).feed(token_ids, FinishReason.LENGTH) == Piece(
            "", len(token_ids), FinishReason.LENGTH
        )
