"""A GGUF file's tokenizer: the ids that its model was trained with, special tokens, templates, ends of generations."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_models import BOS, EOS, TEMPLATE, Vocabulary, byte_level_vocabulary, finish
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.gguf_pretokenizers import SPLITTINGS
from kvrelay.engine.gguf_tokenizer import GgufTokenizer, read_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    "Hello, world! I've 3 apples, they're 12345.67 each; IT'S a  12\n\n34\t5",
    "  two  spaces   three    four\n\n\n  \n indented\n",
    "def f(x):\n    return x ** 2  # y\n\n\tif a != b:\n\t\tpass\r\n",
    "ภาษาไทย ๑๒๓ 日本語テキスト 한국어 Ελλάδα größer",
    "😀👍🏽 👨‍👩‍👧 ½ ²³ x²",
    "don't DON'T Don'T HelloWorld helloWORLD iPhone/path//to",
    " ",
    "",
]
CORPUS = [
    *TEXTS,
    "the theme of the thesis then and there; an answer and another; the end",
    "1 12 123 1234 hello hell help",
]


def read(tmp_path: Path, vocabulary: Vocabulary, *, vocab_size: int = 10_000, arch: str = "llama") -> GgufTokenizer:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    vocabulary.add_to(writer)
    writer.add_tensor("t", np.zeros(1, np.float32))
    finish(writer)
    with Gguf(tmp_path / "m.gguf") as file:
        found = read_tokenizer(file, vocab_size)
    found.backend.save(str(tmp_path / "tokenizer.json"))
    found.backend.from_file(str(tmp_path / "tokenizer.json"))
    return found


def trained_merges(vocab_size: int = 420) -> list[tuple[str, str]]:
    """Merges across every kind of character, so that a wrong cut shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


# --- byte-level -------------------------------------------------------------------------------------------------

# How "I'M a  12345\n\n x=HelloWORLD's" is cut, by hand from each name's rule.
SPLITS = {
    "gpt-2": ["I", "'", "M", " a", " ", " 12345", "\n\n", " x", "=", "HelloWORLD", "'s"],
    "smollm": ["I", "'", "M", " a", "  ", "1", "2", "3", "4", "5", "\n\n", " x", "=", "HelloWORLD", "'s"],
    "llama-bpe": ["I", "'M", " a", " ", " ", "123", "45", "\n\n", " x", "=HelloWORLD", "'s"],
    "qwen2": ["I", "'M", " a", " ", " ", "1", "2", "3", "4", "5", "\n\n", " x", "=HelloWORLD", "'s"],
    "tekken": ["I", "'M", " a", " ", " ", "1", "2", "3", "4", "5", "\n\n", " x", "=Hello", "WORLD", "'s"],
    "gpt-4o": ["I'M", " a", " ", " ", "123", "45", "\n\n", " x", "=Hello", "WORLD's"],
    "deepseek-coder": [
        *("I", "'", "M", " a", "  ", "1", "2", "3", "4", "5", "\n", "\n", " x", "=", "HelloWORLD", "'", "s")
    ],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_cut_as_the_name_says(pre: str) -> None:
    text = "I'M a  12345\n\n x=HelloWORLD's"
    pieces = SPLITTINGS[pre].pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == SPLITS[pre]


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_splitting_loses_nothing(pre: str, tmp_path: Path) -> None:
    found = read(tmp_path, byte_level_vocabulary(pre=pre))
    for text in TEXTS:
        assert found.backend.decode(found.backend.encode(text).ids) == text


@pytest.mark.parametrize(("pre", "oracle"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_ids_are_those_of_transformers_with_the_same_vocabulary(pre: str, oracle: str, tmp_path: Path) -> None:
    import transformers

    merges = trained_merges()
    vocabulary = byte_level_vocabulary(pre=pre, merges=[f"{left} {right}" for left, right in merges])
    found = read(tmp_path, vocabulary).backend
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokens = {"unk_token": None, "bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    expected = getattr(transformers, oracle)(vocab=ids, merges=merges, **tokens)
    for text in [*TEXTS, "e\u0301 \u212b", f"a{EOS}b"]:
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False)


def test_llama3s_pattern_is_that_of_transformers_converter() -> None:
    import inspect

    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    assert SPLITTINGS["llama-bpe"].patterns == (pattern,)


def test_a_word_that_is_a_token_needs_no_merges_where_the_name_says_so(tmp_path: Path) -> None:
    merges = ["h e", "l l"]
    vocabulary = byte_level_vocabulary(pre="llama-bpe", merges=merges)
    tokens = [*vocabulary.tokens[:-2], "hell", BOS, EOS]
    word = Vocabulary("gpt2", tokens, [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2, "llama-bpe", merges)
    assert read(tmp_path, word).backend.encode("hell").tokens == ["hell"]
    cut = Vocabulary("gpt2", tokens, word.kinds, "qwen2", merges)
    assert read(tmp_path, cut).backend.encode("hell").tokens == ["he", "ll"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pre": "viking"}, "tokenizer.ggml.pre = 'viking': not supported; supported: command-r, dbrx"),
        ({"pre": None}, "tokenizer.ggml.pre = None: not supported"),
        ({"model": "bert"}, "tokenizer.ggml.model = 'bert': not supported; supported: gpt2, llama"),
        ({"merges": ["h e", "x y"]}, "tokenizer.ggml.merges = 2 values: 'x y' is no merge of tokens"),
        ({"merges": ["he"]}, "'he' is no merge"),
        ({"merges": None}, "tokenizer.ggml.merges = None: expected an array"),
        ({"kinds": [NORMAL]}, "tokens of 1 kinds"),
        ({"tokens": ["a"] * 272}, "a token is there twice"),
        ({"keys": {"eos_token_id": 272}}, "tokenizer.ggml.eos_token_id = 272: expected a token's id, below 272"),
        ({"keys": {"bos_token_id": 2**32 - 1}}, "tokenizer.ggml.bos_token_id = 4294967295"),
        ({"keys": {"add_bos_token": 7}}, "tokenizer.ggml.add_bos_token = 7: expected true or false"),
    ],
)
def test_a_tokenizer_that_is_not_known_or_broken_is_refused_by_name(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    plain = byte_level_vocabulary()
    assert len(plain.tokens) == 272
    fields = {name: getattr(plain, name) for name in ("model", "tokens", "kinds", "pre", "merges", "keys")}
    with pytest.raises(ModelError, match=f"^m.gguf: .*{problem}"):
        read(tmp_path, Vocabulary(**fields | change))


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="272 tokens of 272 kinds for 271 embeddings"):
        read(tmp_path, byte_level_vocabulary(), vocab_size=271)


# --- special tokens ---------------------------------------------------------------------------------------------


def with_added(*added: tuple[str, int], keys: dict[str, Any] | None = None, pre: str = "gpt-2") -> Vocabulary:
    """The plain vocabulary, and these tokens behind it."""
    plain = byte_level_vocabulary(pre=pre)
    tokens, kinds = [*plain.tokens, *(text for text, _ in added)], [*plain.kinds, *(kind for _, kind in added)]
    return Vocabulary("gpt2", tokens, kinds, pre, plain.merges, keys=plain.keys if keys is None else keys)


def test_added_tokens_are_found_in_text_and_stand_for_themselves(tmp_path: Path) -> None:
    added = (
        ("<|im_start|>", CONTROL),
        ("\n\n\n", USER_DEFINED),
        ("\u2581\u2581", USER_DEFINED),
        ("<x>", USER_DEFINED),
    )
    found = read(tmp_path, with_added(*added, ("[PAD1]", UNUSED), ("[PAD2]", UNUSED)))
    library = found.backend
    assert library.get_vocab_size() == 272 + 4  # tokens at the end that stand for nothing are left out
    encoded = library.encode("<|im_start|>a\n\n\n  <x>é", add_special_tokens=False)
    assert encoded.ids[0] == 272
    assert encoded.ids[2:5] == [273, 274, 275]
    assert library.decode(encoded.ids, skip_special_tokens=True) == "a\n\n\n  <x>é"
    stored = {token["content"]: token["special"] for token in json.loads(library.to_str())["added_tokens"]}
    assert stored == {BOS: True, EOS: True, "<|im_start|>": True, "\n\n\n": False, "  ": False, "<x>": False}


def test_the_router_spells_an_added_token_as_it_stands(tmp_path: Path) -> None:
    from kvrelay.engine.pieces import Pieces

    library = read(tmp_path, with_added(("<café>", USER_DEFINED), ("<｜end▁of▁text｜>", CONTROL))).backend  # noqa: RUF001
    decoder = json.loads(library.to_str())["decoder"]
    contents = library.get_added_tokens_decoder().items()
    verbatim = {i: token.content for i, token in contents if library.model.id_to_token(i) is None}
    pieces = Pieces(decoder, library.id_to_token, verbatim)
    assert pieces[272].decode() == "<café>"
    assert pieces[273].decode() == "<｜end▁of▁text｜>"  # noqa: RUF001


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_once_if_the_file_or_the_kind_says_so(
    pre: str, said: bool | None, expected: bool, tmp_path: Path
) -> None:
    """C11: a completion gets BOS once; a chat only from its template."""
    keys = {"bos_token_id": 270, "eos_token_id": 271} | ({} if said is None else {"add_bos_token": said})
    found = read(tmp_path, with_added(keys=keys, pre=pre))
    assert found.config["add_bos_token"] == expected
    assert found.backend.encode("a").tokens == ([BOS] if expected else []) + ["a"]
    assert found.backend.encode("a", add_special_tokens=False).tokens == ["a"]
    assert (found.config["bos_token"], found.config["eos_token"]) == (BOS, EOS)
    assert found.token_ids == {"bos_token_id": 270, "eos_token_id": 271, "pad_token_id": None}


def test_a_bos_of_any_letters_is_added(tmp_path: Path) -> None:
    keys = {"bos_token_id": 272, "add_bos_token": True, "eos_token_id": 273, "add_eos_token": True}
    found = read(tmp_path, with_added(("<s:1> $A", CONTROL), ("$A:", CONTROL), keys=keys))
    assert found.backend.encode("a").ids[0] == 272
    assert found.backend.encode("a").ids[-1] == 273


@pytest.mark.parametrize(
    ("added", "keys", "expected"),
    [
        ((), {"eos_token_id": 271}, [271]),
        ((("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL)), {"eos_token_id": 271}, [271, 272, 273]),
        (
            (("<x>", CONTROL), ("<y>", CONTROL)),
            {"eos_token_id": 271, "eot_token_id": 272, "eom_token_id": 273},
            [271, 272, 273],
        ),
        ((("<end_of_turn>", USER_DEFINED), ("<|im_end|>", NORMAL)), {"eos_token_id": 0}, [0, 272]),
        ((("<|endoftext|>", CONTROL), ("<|im_end|>", CONTROL)), {"eos_token_id": 273}, [272, 273]),
        ((), {}, []),
    ],
)
def test_every_end_of_a_generation_is_found(
    added: tuple[tuple[str, int], ...], keys: dict[str, int], expected: list[int], tmp_path: Path
) -> None:
    """C09: by the file's ids, and by what ends of turns and texts are called; text that only looks so ends nothing."""
    plain = byte_level_vocabulary()
    tokens = [token if token != EOS else "<eos>" for token in plain.tokens]
    tokens += [text for text, _ in added]
    kinds = [*plain.kinds, *(kind for _, kind in added)]
    vocabulary = Vocabulary("gpt2", tokens, kinds, "gpt-2", plain.merges, keys=keys)
    assert read(tmp_path, vocabulary).end_token_ids == expected


def test_the_chat_template_is_kept_verbatim(tmp_path: Path) -> None:
    plain = byte_level_vocabulary()
    assert read(tmp_path, plain).config["chat_template"] == TEMPLATE
    assert "chat_template" not in read(tmp_path, with_added()).config
    named = [{"name": "default", "template": " {{ x }}\n"}, {"name": "tool_use", "template": "{{ tools }}"}]
    several = Vocabulary("gpt2", plain.tokens, plain.kinds, "gpt-2", plain.merges, template=named)
    assert read(tmp_path, several).config["chat_template"] == named


# --- sentencepiece ----------------------------------------------------------------------------------------------


def sentencepiece_vocabulary(*, prefix: bool, size: int = 700) -> Vocabulary:
    """Pieces with scores as a training gives them: bytes, characters, then merges by their rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=60)
    tokenizer.train_from_iterator(CORPUS, trainer)
    pieces = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>", "\u2581" * 5]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0] * 2
    keys = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    keys |= {} if prefix else {"add_space_prefix": False}
    return Vocabulary("llama", tokens, kinds, "default", scores=scores, keys=keys)


def sentencepiece_ids(text: str, vocabulary: Vocabulary) -> list[int]:
    """Its definition: of all neighbours that are a piece together, the best piece is joined, the leftmost first."""
    scores = {
        t: s
        for t, s, k in zip(vocabulary.tokens, vocabulary.scores or (), vocabulary.kinds, strict=True)
        if k == NORMAL
    }
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joined:
            break
        i = -max(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [
        i
        for symbol in symbols
        for i in ([ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_become_the_merges_that_sentencepiece_would_do(prefix: bool, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(prefix=prefix)
    library = read(tmp_path, vocabulary).backend
    for text in TEXTS:
        expected = sentencepiece_ids((" " if prefix and text else "") + text, vocabulary)
        assert library.encode(text, add_special_tokens=False).ids == expected
        assert library.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize(("oracle", "prefix"), [("LlamaTokenizer", True), ("GemmaTokenizer", False)])
def test_ids_are_those_of_transformers_with_the_same_pieces(oracle: str, prefix: bool, tmp_path: Path) -> None:
    import transformers

    vocabulary = sentencepiece_vocabulary(prefix=prefix)
    library = read(tmp_path, vocabulary).backend
    model = json.loads(library.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    expected = getattr(transformers, oracle)(
        vocab=model["vocab"], merges=merges, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )
    for text in TEXTS:
        if text.startswith(" "):
            continue  # where transformers adds no space before one, and sentencepiece does
        assert library.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False)


def test_pieces_that_users_defined_are_found_before_any_merge(tmp_path: Path) -> None:
    """Gemma's runs of spaces: they are spaces in a text, whatever they are called in the file."""
    vocabulary = sentencepiece_vocabulary(prefix=False)
    library = read(tmp_path, vocabulary).backend
    spaces, turn = len(vocabulary.tokens) - 1, len(vocabulary.tokens) - 2
    encoded = library.encode("<turn>a     b", add_special_tokens=True)
    assert encoded.ids[:2] == [1, turn]  # BOS by default
    assert encoded.ids[3] == spaces
    assert library.decode(encoded.ids) == "a     b"


def test_phi3s_marks_take_the_white_space_behind_them(tmp_path: Path) -> None:
    """As its own tokenizer does; no key of the file says so."""
    vocabulary = sentencepiece_vocabulary(prefix=True)
    for arch, expected in (("phi3", "a"), ("llama", "\n")):
        library = read(tmp_path, vocabulary, arch=arch).backend
        ids = library.encode("<turn>\na", add_special_tokens=False).ids
        assert library.decode(ids[1:]).lstrip(" ")[0] == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scores": None}, "tokenizer.ggml.scores = None: expected an array"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores = 1 values: fewer than"),
        ({"pre": "gemma"}, "tokenizer.ggml.pre = 'gemma': not supported with a model of type llama"),
        ({"keys": {"remove_extra_whitespaces": True}}, "remove_extra_whitespaces = True: not supported"),
    ],
)
def test_pieces_without_what_decides_their_merges_are_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    plain = sentencepiece_vocabulary(prefix=True)
    fields = {name: getattr(plain, name) for name in ("model", "tokens", "kinds", "pre", "scores", "keys")}
    with pytest.raises(ModelError, match=f"^m.gguf: .*{problem}"):
        read(tmp_path, Vocabulary(**fields | change))
