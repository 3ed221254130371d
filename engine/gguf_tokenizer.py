"""From a GGUF file's vocabulary to tokenizer.json and tokenizer_config.json.

Two kinds of vocabulary are in use by decoders: `gpt2`, byte-level merges as a list; and `llama`, a sentencepiece model
whose merges follow from the pieces' scores. Special tokens, the end of a generation and the chat template are carried
over as they stand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvrelay.engine.errors import ModelError
from kvrelay.engine.gguf_file import Gguf
from kvrelay.engine.gguf_pretokenizers import SPLITTINGS

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"  # sentencepiece's
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# What ends a turn or a text, by what it is called: files name one such id, and many models have several.
_ENDS = frozenset(
    """<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|end_of_turn|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT>
    <｜end▁of▁sentence｜>""".split()  # noqa: RUF001, SIM905 - these are its letters; one a line is no clearer
)
# Phi-3's marks take the white space behind them, but for these; no key says so.
_PHI3_KEEP_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a folder says of text."""

    backend: Tokenizer
    config: dict[str, Any]  # tokenizer_config.json
    token_ids: dict[str, int | None]  # bos_token_id, eos_token_id, pad_token_id
    end_token_ids: list[int]  # each ends a generation


def read_tokenizer(gguf: Gguf, vocab_size: int) -> GgufTokenizer:
    """vocab_size: of the embedding; no token may lie beyond. Raises: ModelError."""
    vocabulary = _Vocabulary(gguf, vocab_size)
    kind = gguf.metadata.get(f"{_KEY}model")
    if kind == "gpt2":
        library, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        library, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.error("model", "not supported; supported: gpt2, llama")
    library.add_tokens(vocabulary.added())
    if library.get_vocab_size() != vocabulary.size:
        raise vocabulary.error("tokens", "tokens that are added and others are mixed at the end")
    adds = {"bos": vocabulary.flag("add_bos_token", adds_bos), "eos": vocabulary.flag("add_eos_token", False)}
    ids = {role: vocabulary.token_id(f"{name}_token_id") for role, name in _ROLES.items()}
    before, behind = (ids[role] if adds[role] else None for role in ("bos", "eos"))
    if before is not None or behind is not None:
        library.post_processor = _post_processor(vocabulary, before, behind)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": vocabulary.tokens[id_] for role, id_ in ids.items() if id_ is not None},
        "add_bos_token": before is not None,
        "add_eos_token": behind is not None,
    }
    template = _chat_template(gguf)
    return GgufTokenizer(
        backend=library,
        config=config | ({} if template is None else {"chat_template": template}),
        token_ids={f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad")},
        end_token_ids=vocabulary.end_ids(),
    )


class _Vocabulary:
    """The tokens with their kinds; those at the end that stand for nothing are left out."""

    def __init__(self, gguf: Gguf, vocab_size: int) -> None:
        self._gguf = gguf
        tokens = self.array("tokens", str)
        kinds = self.array("token_type", int) if f"{_KEY}token_type" in gguf.metadata else [_NORMAL] * len(tokens)
        if not tokens or len(tokens) > vocab_size or len(kinds) != len(tokens):
            raise self.error("tokens", f"{len(tokens)} tokens of {len(kinds)} kinds for {vocab_size} embeddings")
        self.size = max((i + 1 for i, kind in enumerate(kinds) if kind != _UNUSED), default=0)
        self.kinds = kinds[: self.size]
        # User-defined pieces are looked for in the text itself, where a space is a space.
        pairs = zip(tokens, self.kinds, strict=False)
        self.tokens = [text.replace(_SPACE, " ") if kind == _USER_DEFINED else text for text, kind in pairs]
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != self.size:
            raise self.error("tokens", "a token is there twice")

    def array(self, key: str, item: type) -> list[Any]:
        value = self._gguf.metadata.get(_KEY + key)
        if not isinstance(value, list) or not all(isinstance(entry, item) for entry in value):
            raise self.error(key, "expected an array")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self._gguf.metadata.get(_KEY + key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def token_id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < self.size:
            raise self.error(key, f"expected a token's id, below {self.size}")
        return value

    def end_ids(self) -> list[int]:
        named = [self.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        called = [i for i, kind in enumerate(self.kinds) if self._is_special(i, kind) and self.tokens[i] in _ENDS]
        return sorted({*called, *(id_ for id_ in named if id_ is not None)})

    def num_own(self) -> int:
        """How many tokens are the model's own: those before the last that are added to it, one after the other."""
        own = self.size
        while own and self.kinds[own - 1] in (_CONTROL, _USER_DEFINED):
            own -= 1
        return own

    def added(self) -> list[AddedToken]:
        """The tokens that are looked for in a text before anything else, in the order of their ids."""
        return [
            AddedToken(text, special=self._is_special(i, kind), normalized=False, rstrip=self._takes_space(text, kind))
            for i, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        ]

    def _is_special(self, i: int, kind: int) -> bool:
        return kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and self.tokens[i] in _ENDS)

    def _takes_space(self, text: str, kind: int) -> bool:
        is_phi3 = self.get("model") == "llama" and self._gguf.metadata.get("general.architecture") == "phi3"
        return is_phi3 and kind == _CONTROL and text not in _PHI3_KEEP_SPACE

    def error(self, key: str, problem: str) -> ModelError:
        value = self._gguf.metadata.get(_KEY + key)
        shown = f"{len(value)} values" if isinstance(value, list) else repr(value)
        return ModelError(f"{self._gguf.name}: {_KEY}{key} = {shown}: {problem}")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """And whether BOS is added where the file does not say."""
    splitting = SPLITTINGS.get(vocabulary.get("pre"))
    if splitting is None:
        raise vocabulary.error("pre", f"not supported; supported: {', '.join(SPLITTINGS)}")
    # Tokens at the end are added to the model and not part of it: their letters stand for themselves.
    own = dict(list(vocabulary.ids.items())[: vocabulary.num_own()])
    merges = []
    for merge in vocabulary.array("merges", str):
        end = merge.find(" ", 1)
        left, right = merge[:end], merge[end + 1 :]
        if end < 0 or left not in own or right not in own or left + right not in own:
            raise vocabulary.error("merges", f"{merge!r} is no merge of tokens")
        merges.append((left, right))
    library = Tokenizer(models.BPE(own, merges, ignore_merges=splitting.ignore_merges))
    library.pre_tokenizer = splitting.pre_tokenizer
    library.decoder = decoders.ByteLevel()
    if splitting.normalizer is not None:
        library.normalizer = splitting.normalizer
    return library, splitting.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    if vocabulary.get("pre", "default") != "default":
        raise vocabulary.error("pre", "not supported with a model of type llama")
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if vocabulary.get(key):
            raise vocabulary.error(key, "not supported")
    unknown = vocabulary.token_id("unknown_token_id")
    library = Tokenizer(
        models.BPE(
            vocabulary.ids,
            list(_merges(vocabulary)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=all(byte in vocabulary.ids for byte in _BYTES),
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.normalizer = normalizers.Replace(" ", _SPACE)
    if vocabulary.flag("add_space_prefix", True):
        library.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), library.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    return library


def _merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The merges that make sentencepiece's tokens, best first: every way to cut a piece into two, by its score."""
    scores = vocabulary.array("scores", float)
    if len(scores) < vocabulary.size:
        raise vocabulary.error("scores", f"fewer than {vocabulary.size} tokens")
    pieces = {text: i for text, i in vocabulary.ids.items() if vocabulary.kinds[i] == _NORMAL}
    for text in sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text])):
        cuts = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in pieces and text[i:] in pieces]
        yield from sorted(cuts, key=lambda cut: (pieces[cut[0]], pieces[cut[1]]))


def _post_processor(vocabulary: _Vocabulary, before: int | None, behind: int | None) -> Any:
    """BOS and EOS by neutral names, since their own may hold letters that mean something to the library."""
    ids = {name: id_ for name, id_ in (("bos", before), ("eos", behind)) if id_ is not None}
    first, last = ([name] if name in ids else [] for name in ("bos", "eos"))
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[{"id": name, "ids": [id_], "tokens": [vocabulary.tokens[id_]]} for name, id_ in ids.items()],
    )


def _chat_template(gguf: Gguf) -> str | list[dict[str, str]] | None:
    """The default one, or all of them with their names, as tokenizer_config.json has them."""
    default, prefix = gguf.metadata.get(_TEMPLATE), f"{_TEMPLATE}."
    named = {key.removeprefix(prefix): text for key, text in gguf.metadata.items() if key.startswith(prefix)}
    if default is not None:
        named = {"default": default} | named
    for name, text in named.items():
        if not isinstance(text, str):
            raise ModelError(f"{gguf.name}: {_TEMPLATE}: {name}: expected a string")
    if named.keys() == {"default"}:
        return str(default)
    return [{"name": name, "template": str(text)} for name, text in named.items()] or None
