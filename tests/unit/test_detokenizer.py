"""Incremental text: whole characters, stop strings, stop tokens."""

import itertools
import time

import pytest
from support.tiny_tokenizers import EOS, byte_fallback, byte_level

from kvrelay.engine.errors import ModelError
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.detokenizer import Detokenizer, OutputText, Piece, StopString, decode
from kvrelay.router.pieces import Pieces, byte_level_alphabet
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


def test_a_stop_string_counts_only_from_min_tokens_on() -> None:
    text = output(stop=("x",), min_tokens=3)
    assert text.feed(byte_ids("xxyx"), None) == Piece("xxy", 4, FinishReason.STOP)


def test_the_longer_of_two_stop_strings_that_end_together_counts() -> None:
    assert output(stop=("b", "ab")).feed(byte_ids("xab"), None).text == "x"


def test_every_short_stop_string_is_found_where_it_first_ends() -> None:
    """All stop strings of two letters up to length four, in all texts of length seven."""
    stops = ["".join(letters) for size in range(1, 5) for letters in itertools.product("ab", repeat=size)]
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    for stop, text in itertools.product(stops, texts):
        looking = StopString(stop)
        found = next((end for end, character in enumerate(text, 1) if looking.feed(character)), 0)
        assert found == (text.find(stop) + len(stop) if stop in text else 0)


def test_work_per_token_does_not_grow_with_the_output() -> None:
    """Endless broken bytes and an endless almost-stop: both would grow a naive decoder's window for ever."""
    broken = [byte_level().token_to_id(CHARACTER_OF[0xF0])] * 20_000
    text = output(stop=("a" * 200 + "b",))
    started = time.monotonic()
    assert text.feed(broken, None).num_tokens == len(broken)
    assert text.feed(byte_ids("a") * 20_000, None).num_tokens == 20_000
    assert time.monotonic() - started < 5  # quadratic: minutes


def test_an_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="WordPiece"):
        Pieces({"type": "WordPiece", "prefix": "##"}, lambda _: None)
    with pytest.raises(ModelError, match="no decoder"):
        Pieces(None, lambda _: None)


def test_a_metaspace_decoder_drops_the_first_tokens_space() -> None:
    tokens = {0: "▁Hello", 1: "▁World"}
    pieces = Pieces({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, tokens.get)
    assert (pieces.first(0), pieces[0], pieces[1], pieces[7]) == (b"Hello", b" Hello", b" World", b"")
