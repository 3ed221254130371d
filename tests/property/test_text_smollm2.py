"""The embedded model's own tokenizer: any ids, any text, any deltas."""

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from kvrelay.engine import model_store
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.detokenizer import OutputText, decode
from kvrelay.router.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]

relaxed = settings(deadline=None, max_examples=300)
scripts = st.sampled_from(
    ["😀👍🏽", "👩\u200d👩\u200d👧", "🇹🇭", "ภาษาไทย", "𠮷𪚥", "日本語", "e\u0301", "\r\n\t", "  ", "<|im_end|>"]
)
# Its vocabulary lacks some bytes, and drops what is spelled with them: six control characters, planes 4 to 16.
characters = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])
texts = st.lists(st.text(characters, max_size=4) | scripts, max_size=12).map("".join)


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_store.resolve("smollm2") / "tokenizer.json"))


@pytest.fixture(scope="module")
def served() -> Tokenizer:
    return Tokenizer.load(read_model_info(model_store.resolve("smollm2"), "smollm2"))


def stream(served: Tokenizer, token_ids: list[int], size: int, *, skip: bool) -> str:
    sampling = SamplingParams(max_tokens=1000, seed=0, skip_special_tokens=skip)
    output = OutputText(served, sampling)
    pieces = [output.feed(token_ids[i : i + size], None) for i in range(0, len(token_ids), size)]
    return "".join(piece.text for piece in [*pieces, output.feed([], FinishReason.LENGTH)])


@relaxed
@given(token_ids=st.lists(st.integers(0, 49_160), max_size=32), size=st.integers(1, 5), skip=st.booleans())
def test_any_ids_are_decoded_as_the_library_does(
    library: tokenizers.Tokenizer, served: Tokenizer, token_ids: list[int], size: int, skip: bool
) -> None:
    """C02, C03, A14: the last few ids are beyond the vocabulary."""
    expected = library.decode(token_ids, skip_special_tokens=skip)
    assert stream(served, token_ids, size, skip=skip) == expected
    assert decode(served, token_ids, skip_special_tokens=skip) == expected


@relaxed
@given(text=texts, size=st.integers(1, 5))
def test_any_text_comes_back(library: tokenizers.Tokenizer, served: Tokenizer, text: str, size: int) -> None:
    """C02."""
    token_ids = library.encode(text, add_special_tokens=False).ids
    assert stream(served, token_ids, size, skip=False) == text
