"""Streamed text equals the text of all tokens at once, whatever the ids and however they are cut into deltas.

The oracle is the library's own decoding: of prompt and output together, less what it makes of the prompt.
"""

import re

import pytest
import tokenizers
from hypothesis import assume, given, settings, strategies as st
from support.tiny_tokenizers import (
    BOS,
    EOS,
    byte_fallback,
    byte_level,
    byte_level_with_added,
    gemma_like,
    unigram,
    word_level,
    word_piece,
)

from kvrelay.engine.pieces import byte_level_alphabet
from kvrelay.engine.request import FinishReason, Request, RequestKey, SamplingParams
from kvrelay.router.detokenizer import Detokenizer, OutputText, decode, make_output_texts
from kvrelay.router.tokenizer import Tokenizer

KINDS = {
    kind.__name__: kind
    for kind in (byte_level, byte_level_with_added, byte_fallback, gemma_like, unigram, word_piece, word_level)
}
SERVED = {name: Tokenizer(kind()) for name, kind in KINDS.items()}
WITH_BYTE_TOKENS = ("byte_fallback", "gemma_like")
UNKNOWN = 999  # logits are often padded
PIECES = ["😀", "👩\u200d👩\u200d👧", "🇹🇭", "👍🏽", "ไทย", "ก็", "𠮷", "語", "é", "e\u0301", "Ελ", "\ufffd", "\n\t"]
BYTES = [b"\xc0\xaf", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f", b"\xe0\xb9", b"\xc3", b"\x80"]
BYTES += [b"\xff", "😀".encode(), "ไ".encode(), "é".encode(), b"a"]
texts = st.lists(st.sampled_from([*PIECES, *"abc0▁", " ", "  ", "the", " Paris"]), max_size=16).map("".join)
kinds = pytest.mark.parametrize("kind", KINDS)
relaxed = settings(deadline=None, max_examples=200)


def outputs(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, some beyond the vocabulary, and ids of bytes: characters of several tokens, and broken ones."""
    size = KINDS[kind]().get_vocab_size()
    any_id, added, byte = st.integers(0, size + 2), st.integers(size - 8, size), st.integers(3 + 0x80, 3 + 0xFF)
    return st.lists(any_id, max_size=24) | st.lists(any_id | added | byte, max_size=24)


def library_of(kind: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, with the contents of added tokens spelled so that its byte-level decoder shows them."""
    library = KINDS[kind]()
    if kind != "byte_level_with_added":
        return library
    spell = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    twin = byte_level().from_str(byte_level().to_str())
    for _, token in sorted(library.get_added_tokens_decoder().items())[3:]:
        add = twin.add_special_tokens if token.special else twin.add_tokens
        assert add([spell(token.content)[0][0]]) == 1
    return twin


ORACLES = {kind: library_of(kind) for kind in KINDS}


def meaning(kind: str, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the output adds to the prompt's text."""
    before, after = (ORACLES[kind].decode(ids, skip_special_tokens=skip) for ids in (prompt, prompt + output))
    assert after.startswith(before)
    if kind not in WITH_BYTE_TOKENS:
        return after.removeprefix(before)
    meant = by_bytes(kind, output, skip, begins=not before)
    assert after == before + meant or "\ufffd" in after  # the library spoils the neighbours of a bad byte
    return meant


def by_bytes(kind: str, output: list[int], skip: bool, *, begins: bool) -> str:
    """The same by the meaning of each token, for sentencepiece-like kinds with byte tokens."""
    library, whole = KINDS[kind](), b""
    for token_id in output:
        token = library.id_to_token(token_id)
        if token is None or (skip and token in ("<unk>", BOS, EOS)):
            continue
        is_byte = re.fullmatch("<0x(..)>", token)
        piece = bytes.fromhex(is_byte[1]) if is_byte else token.replace("▁", " ").encode()
        whole += piece.removeprefix(b" ") if begins and kind == "byte_fallback" else piece
        begins = False
    return whole.decode("utf-8", "replace")


@st.composite
def cuts(draw: st.DrawFn, items: list[int]) -> list[list[int]]:
    """The items in consecutive, perhaps empty, deltas."""
    places = sorted(draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[start:end] for start, end in zip([0, *places], [*places, len(items)], strict=True)]


def request(prompt: list[int], **sampling: object) -> Request:
    params = SamplingParams(max_tokens=100, seed=0, **sampling)  # type: ignore[arg-type]
    return Request(key=RequestKey("r", 0), prompt_token_ids=tuple(prompt), sampling=params)


def stream(output: OutputText, deltas: list[list[int]]) -> str:
    """The text of a choice that its length ends, delta by delta."""
    pieces = [output.feed(delta, None) for delta in deltas[:-1]]
    assert all(piece.finish_reason is None for piece in pieces)
    pieces.append(output.feed(deltas[-1], FinishReason.LENGTH))
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    return "".join(piece.text for piece in pieces)


@relaxed
@given(outputs("byte_level"), st.booleans())
def test_a_byte_level_text_is_the_librarys_own(token_ids: list[int], skip: bool) -> None:
    """C02, C03: also where bytes are broken or cut."""
    expected = byte_level().decode(token_ids, skip_special_tokens=skip)
    assert decode(SERVED["byte_level"], token_ids, skip_special_tokens=skip) == expected


@kinds
@relaxed
@given(data=st.data())
def test_the_cut_into_deltas_makes_no_difference(kind: str, data: st.DataObject) -> None:
    """A14, D08: nothing is lost or doubled with any delta size, the last delta holds text too, and the whole is what
    the library makes of it after the prompt, also where the prompt shows nothing."""
    prompt = KINDS[kind]().encode(data.draw(st.sampled_from(["the", "Paris is", BOS, f"{EOS}{BOS}"]))).ids
    prompt = data.draw(st.sampled_from([prompt, [UNKNOWN], [1, *prompt], [*prompt, UNKNOWN]]))
    output, skip = data.draw(outputs(kind)), data.draw(st.booleans())
    (text,) = make_output_texts(SERVED[kind], request(prompt, skip_special_tokens=skip))
    assert stream(text, data.draw(cuts(output))) == meaning(kind, prompt, output, skip)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_level"])
@relaxed
@given(data=st.data(), skip=st.booleans())
def test_a_text_by_itself_is_the_librarys_own(kind: str, data: st.DataObject, skip: bool) -> None:
    """C02, C03."""
    output = data.draw(outputs(kind))
    assert decode(SERVED[kind], output, skip_special_tokens=skip) == meaning(kind, [], output, skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_with_added", "byte_fallback", "gemma_like"])
@relaxed
@given(text=texts)
def test_a_text_comes_back_whole_each_character_with_its_last_token(kind: str, text: str) -> None:
    """C02: where there is a token for every byte, nothing is lost, and nothing waits that is whole."""
    assume("▁" not in text or kind not in WITH_BYTE_TOKENS)  # a space to them
    token_ids = KINDS[kind]().encode(text).ids
    detokenizer, known = Detokenizer(SERVED[kind], skip_special_tokens=True, begins=True), ""
    for i, token_id in enumerate(token_ids):
        known += detokenizer.feed(token_id)
        if "\ufffd" not in text:  # so all that the oracle shows is at the end, for what is not whole yet
            assert known == meaning(kind, [], token_ids[: i + 1], True).rstrip("\ufffd")
    assert known + detokenizer.flush() == text


@relaxed
@given(st.lists(st.sampled_from(BYTES), max_size=12).map(b"".join))
def test_broken_bytes_look_alike_in_every_kind_of_vocabulary(values: bytes) -> None:
    """C03: over-long forms, surrogates, lone continuation bytes, cut characters: one policy, Unicode's."""
    spelled = {byte: character for character, byte in byte_level_alphabet().items()}
    for kind, tokens in (
        ("byte_level", [spelled[value] for value in values]),
        ("byte_fallback", [f"<0x{value:02X}>" for value in values]),
    ):
        token_ids = [KINDS[kind]().token_to_id(token) for token in tokens]
        (text,) = make_output_texts(SERVED[kind], request(KINDS[kind]().encode("the").ids))
        assert stream(text, [[token_id] for token_id in token_ids] + [[]]) == values.decode("utf-8", "replace")
