"""What a token adds to the text, by each decoder; which decoders are refused."""

from typing import Any

import pytest
from support.tiny_tokenizers import byte_fallback, byte_level_with_added
from tokenizers import decoders

from kvrelay.engine.errors import ModelError
from kvrelay.engine.pieces import Pieces
from kvrelay.router.detokenizer import decode
from kvrelay.router.tokenizer import Tokenizer

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FUSE, BYTE_FALLBACK, BYTE_LEVEL = {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "ByteLevel"}


def pieces(decoder: dict[str, Any] | None, *tokens: str) -> Pieces:
    return Pieces(decoder, dict(enumerate(tokens)).get)


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),  # its spaces depend on the token after them
        ({"type": "Replace", "pattern": {"Regex": "▁"}, "content": " "}, "Regex"),
        (STRIP, "Strip"),
        (chain(REPLACE, STRIP), "Strip"),  # of every token
        (chain(REPLACE, FUSE, {**STRIP, "stop": 1}), "Strip"),
        (chain(REPLACE, FUSE, STRIP, STRIP), "Strip"),
        (chain(FUSE, BYTE_FALLBACK), "ByteFallback"),  # of the whole text
        (chain(FUSE, REPLACE), "Replace"),
        (chain(REPLACE, BYTE_LEVEL), "ByteLevel"),
        (chain(chain(REPLACE)), "Sequence"),
    ],
)
def test_a_decoder_that_is_not_supported_is_refused_by_name(decoder: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        pieces(decoder)


def test_a_metaspace_decoder_drops_the_first_tokens_space() -> None:
    known = pieces(
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, "▁Hello", "▁World"
    )
    assert (known.first(0), known[0], known[1], known[7]) == (b"Hello", b" Hello", b" World", b"")
    assert known.first(7) is None
    never = pieces({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}, "▁Hello")
    assert never.first(0) == b" Hello"


def test_a_word_piece_goes_on_with_the_word_before_it() -> None:
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    known = pieces(decoder, "un", "##able", "##", ".", "n't", "do not")
    assert [known[i] for i in range(6)] == [b" un", b"able", b"", b".", b"n't", b" don't"]
    assert [known.first(i) for i in range(6)] == [b"un", b"##able", b"##", b".", b"n't", b"do not"]
    plain = pieces(decoder | {"cleanup": False}, ".", "do not")
    assert (plain[0], plain[1]) == (b" .", b" do not")


def test_without_a_decoder_tokens_are_words() -> None:
    known = pieces(None, "the", "Paris")
    assert known.first(0) == b"the"
    assert known[1] == b" Paris"


@pytest.mark.parametrize("token", ["<0x0A>", "<0x0a>"])
def test_a_byte_token_is_a_byte_only_with_byte_fallback(token: str) -> None:
    assert pieces(chain(REPLACE, BYTE_FALLBACK, FUSE), token)[0] == b"\n"
    assert pieces(chain(REPLACE, FUSE), token)[0] == token.encode()


def test_a_token_added_to_a_byte_level_vocabulary_stands_for_its_content() -> None:
    """The library reads letters of it as bytes where the alphabet has them too: what goes in does not come out."""
    library = byte_level_with_added()
    tokenizer = Tokenizer(library)
    for text in ("café", "đem", "ñ語", "<\uff5cfin▁de▁fête\uff5c>"):
        token_ids = library.encode(text).ids
        assert len(token_ids) == 1
        assert decode(tokenizer, token_ids, skip_special_tokens=False) == text
    assert library.decode(library.encode("café").ids) == "caf\ufffd"
    assert library.decode(library.encode("đem").ids) == "\x11em"


def test_a_bad_byte_spoils_no_character_beside_it() -> None:
    """C03: the library spoils the whole run of byte tokens, so that a character changes with what comes after it."""
    values = [*"é".encode(), 0xFF, *"😀".encode()]
    token_ids = [byte_fallback().token_to_id(f"<0x{value:02X}>") for value in values]
    assert decode(Tokenizer(byte_fallback()), token_ids, skip_special_tokens=True) == "é\ufffd😀"
    assert byte_fallback().decode(token_ids[:2]) == "é"
    assert byte_fallback().decode(token_ids) == "\ufffd" * 7
    assert decoders.ByteLevel().decode(["Ã©ÿðŁĺĢ"]) == "é\ufffd😀"  # as it does itself with a byte-level vocabulary
