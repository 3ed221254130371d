"""Streamed text equals the text of all tokens at once, whatever the ids and however they are cut into deltas."""

import re

import pytest
from hypothesis import given, strategies as st
from support.tiny_tokenizers import byte_fallback, byte_level

from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.detokenizer import Detokenizer, OutputText, decode
from kvrelay.router.tokenizer import Tokenizer

BYTE_LEVEL, BYTE_FALLBACK = Tokenizer(byte_level()), Tokenizer(byte_fallback())
NUM_IDS = 420  # some beyond either vocabulary: logits are often padded
ids = st.lists(st.integers(0, NUM_IDS), max_size=40)
# Ids of bytes above 0x7f are common here: characters that need several tokens, and broken ones.
byte_ids = st.lists(st.integers(3 + 0x80, 3 + 0xFF) | st.integers(0, NUM_IDS), max_size=24)
texts = st.text(st.sampled_from("abc the Paris ▁äé語😀ไe\u0301\n\t0"), max_size=40)


@st.composite
def cuts(draw: st.DrawFn, items: list[int]) -> list[list[int]]:
    """The items in consecutive, perhaps empty, deltas."""
    places = sorted(draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[start:end] for start, end in zip([0, *places], [*places, len(items)], strict=True)]


def stream(tokenizer: Tokenizer, deltas: list[list[int]], **sampling: object) -> tuple[str, FinishReason | None]:
    params = SamplingParams(max_tokens=100, seed=0, **sampling)  # type: ignore[arg-type]
    output, shown = OutputText(tokenizer, params), ""
    for i, delta in enumerate(deltas):
        piece = output.feed(delta, FinishReason.LENGTH if i == len(deltas) - 1 else None)
        shown += piece.text
        if piece.finish_reason is not None:
            return shown, piece.finish_reason
    raise AssertionError("the last delta finishes")


@given(ids, st.booleans())
def test_a_byte_level_text_is_the_librarys_own(token_ids: list[int], skip: bool) -> None:
    """C02, C03: also where bytes are broken or cut."""
    expected = byte_level().decode(token_ids, skip_special_tokens=skip)
    assert decode(BYTE_LEVEL, token_ids, skip_special_tokens=skip) == expected


@given(texts)
def test_a_byte_fallback_text_is_the_librarys_own(text: str) -> None:
    """C02."""
    token_ids = byte_fallback().encode(text).ids
    assert decode(BYTE_FALLBACK, token_ids, skip_special_tokens=True) == byte_fallback().decode(token_ids)


@given(byte_ids, st.booleans())
def test_broken_fallback_bytes_spoil_no_character_beside_them(token_ids: list[int], skip: bool) -> None:
    """C03. The oracle is the bytes' own meaning: the library makes a whole run of bytes U+FFFD when one is bad."""
    whole = b""
    for token_id in token_ids:
        token = byte_fallback().id_to_token(token_id)
        if token is None or (skip and token in ("<unk>", "<s>", "</s>")):
            continue
        is_byte = re.fullmatch("<0x(..)>", token)
        whole += bytes.fromhex(is_byte[1]) if is_byte else token.replace("▁", " ").encode()
    text = whole.decode("utf-8", "replace")
    detokenizer = Detokenizer(BYTE_FALLBACK, skip_special_tokens=skip)
    assert "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush() == text
    assert decode(BYTE_FALLBACK, token_ids, skip_special_tokens=skip) == text.removeprefix(" ")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@given(data=st.data())
def test_the_cut_into_deltas_makes_no_difference(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A14, D08: nothing is lost or doubled with any delta size, and the last delta holds text too."""
    token_ids = data.draw(byte_ids)
    whole, _ = stream(tokenizer, [token_ids])
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    assert whole == "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()
    assert stream(tokenizer, data.draw(cuts(token_ids)))[0] == whole


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text of beginnings of stop strings, and the stop strings: those that overlap themselves are the rule."""
    stops = draw(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
    beginnings = [stop[:end] for stop in stops for end in range(1, len(stop))]
    parts = draw(st.lists(st.sampled_from([*beginnings, "a", "b", "é"]), max_size=8))
    return "".join(parts), stops


@given(near_misses(), st.data())
def test_a_stop_string_ends_the_text_at_its_first_end(
    text_and_stops: tuple[str, list[str]], data: st.DataObject
) -> None:
    """A14: the text before the stop string is all there, once; with the flag, the stop string too."""
    text, stops = text_and_stops
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    expected, reason, stop = text, FinishReason.LENGTH, ""
    if ends:
        end, minus_length, stop = min(ends)
        expected, reason = text[: end + minus_length], FinishReason.STOP
    deltas = data.draw(cuts(byte_level().encode(text).ids))
    assert stream(BYTE_LEVEL, deltas, stop=tuple(stops)) == (expected, reason)
    shown = stream(BYTE_LEVEL, deltas, stop=tuple(stops), include_stop_str_in_output=True)
    assert shown == (expected + stop, reason)


@given(byte_ids, st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(token_ids: list[int], stops: list[str]) -> None:
    output = OutputText(BYTE_LEVEL, SamplingParams(max_tokens=100, seed=0, stop=tuple(stops)))
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=True)
    shown = known = ""
    for token_id in token_ids:
        piece = output.feed([token_id], None)
        shown, known = shown + piece.text, known + detokenizer.feed(token_id)
        if piece.finish_reason is not None:
            return
        held = known.removeprefix(shown)
        assert known == shown + held
        assert held == "" or any(stop.startswith(held) for stop in stops)
