"""Words that the output must not hold, as the token sequences that would spell them."""

import pytest
import tokenizers
from support.tiny_tokenizers import byte_fallback, byte_level
from tokenizers import normalizers

from kvrelay.engine.errors import InvalidArgument
from kvrelay.router.tokenizer import Tokenizer


def spelled(library: tokenizers.Tokenizer, *texts: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(library.encode(text, add_special_tokens=False).ids) for text in texts)


async def test_a_word_is_spelled_at_the_start_and_behind_a_space() -> None:
    library = byte_level()
    assert await Tokenizer(library).encode_bad_words(["the", "Rome"]) == spelled(
        library, "the", " the", "Rome", " Rome"
    )


async def test_leading_spaces_change_nothing_and_no_sequence_comes_twice() -> None:
    library = byte_level()
    words = ["the", " the", "   the", "the", "the "]
    assert await Tokenizer(library).encode_bad_words(words) == spelled(library, "the", " the", "the ", " the ")


@pytest.mark.parametrize("library", [byte_level(adds_bos=True), byte_fallback()])
async def test_no_special_token_is_put_before_a_word(library: tokenizers.Tokenizer) -> None:
    (bos,) = library.encode("").ids
    for word in await Tokenizer(library, bos_token_id=bos, add_bos_token=True).encode_bad_words(["the", "is"]):
        assert bos not in word


async def test_a_word_that_becomes_no_tokens_is_refused_by_its_place() -> None:
    for library, word in ((byte_level(), "  "), (stripping(), "\n")):
        with pytest.raises(InvalidArgument, match=r"bad_words\[1\] = .*: becomes no tokens"):
            await Tokenizer(library).encode_bad_words(["a", word])


async def test_many_long_words_are_spelled_on_a_thread_and_come_out_the_same() -> None:
    library = byte_level()
    words = [f"{i}{'x' * 60}" for i in range(128)]
    found = await Tokenizer(library).encode_bad_words(words)
    assert found == spelled(library, *(text for word in words for text in (word, f" {word}")))


async def test_no_words_are_no_work() -> None:
    assert await Tokenizer(byte_level()).encode_bad_words([]) == ()


def stripping() -> tokenizers.Tokenizer:
    """A tokenizer that drops white space around a text."""
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    library.normalizer = normalizers.Strip()
    return library
