"""Texts far over what fits are refused by their beginning; no text that fits is."""

import pytest
from support.tiny_tokenizers import byte_fallback, byte_level, gemma_like, unigram, word_piece

from kvrelay.engine.errors import InvalidArgument
from kvrelay.router.api import ChatMessage
from kvrelay.router.chat_template import ChatTemplate
from kvrelay.router.tokenizer import Tokenizer

LIBRARIES = {library.__name__: library() for library in (byte_level, byte_fallback, gemma_like, unigram, word_piece)}
TEXTS = {
    "one word": "x" * 9_000,
    "white space": " " * 9_000,
    "words": "Paris is the capital. " * 450,
    "a long word at the end": "the " * 500 + "x" * 9_000,
    "a long word first": "x" * 9_000 + " the" * 500,
    "emoji": "😀" * 2500,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
async def test_a_text_is_refused_by_its_beginning_only_where_the_whole_is_too_long(library, text: str) -> None:
    tokenizer = Tokenizer(library)
    whole = await tokenizer.encode(text)
    for at_most in (len(whole), len(whole) + 1, 10**6):
        assert await tokenizer.encode(text, at_most=at_most) == whole
    for at_most in {1, 10, len(whole) // 100, len(whole) // 2}:
        if 0 < at_most < len(whole):
            try:
                assert await tokenizer.encode(text, at_most=at_most) == whole
            except InvalidArgument as error:
                assert error.message == f"prompt = 'more than {at_most} tokens': at most {at_most}"  # noqa: PT017


async def test_a_text_of_many_times_the_context_is_refused_without_tokenising_it() -> None:
    """E03."""
    tokenizer = Tokenizer(byte_level(), chat_template=ChatTemplate("{{ messages[0].content }}", {}))
    text = TEXTS["words"]
    with pytest.raises(InvalidArgument, match="more than 50 tokens"):
        await tokenizer.encode(text, at_most=50)
    with pytest.raises(InvalidArgument, match="more than 50 tokens"):
        await tokenizer.encode_chat([ChatMessage("user", text)], at_most=50)
