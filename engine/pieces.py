"""What each token id adds to the text, as bytes: tokenizer.json's decoder, one token at a time.

Bytes, not text: a token may hold half a character. The decoders that causal models use work token by token but for
one rule at the very start of a text (`first`); any other decoder is refused by name. Two things differ from the
library's own decoding, on purpose:

- Bytes that are no character become U+FFFD by one rule, Unicode's: one for each longest beginning of a character. The
  library does so in byte-level vocabularies; of byte-fallback tokens it spoils the whole run where one byte is bad, the
  good characters too, so that what a character is would depend on tokens that come after it.
- A token added to a byte-level vocabulary stands for its content, as it does in a prompt. The library takes the
  letters in it that are also in the vocabulary's alphabet ("é", "đ") for the bytes that they stand for there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.engine.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKENS = {f"<0x{byte:{form}}>": bytes([byte]) for byte in range(256) for form in ("02X", "02x")}

# What WordPiece's clean-up does, within each token, in this order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)

_Decode = Callable[[str, bool], bytes]  # a token and whether it begins a text -> what it adds


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters for
    themselves, the characters from U+0100 on for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Pieces(dict[int, bytes]):
    """token id -> bytes, worked out at first use. Ids that the tokenizer does not know add nothing."""

    def __init__(
        self,
        decoder: dict[str, Any] | None,
        id_to_token: Callable[[int], str | None],
        added: Mapping[int, str] | None = None,
    ) -> None:
        """`added`: the contents of the tokens that are not the model's own.

        Raises: ModelError for a decoder that is not supported.
        """
        super().__init__()
        self._id_to_token = id_to_token
        self._decode = _make_decode(decoder)
        self._verbatim = added if added and self._decode is _decode_byte_level else {}

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._piece(token_id, begins=False) or b""
        return piece

    def first(self, token_id: int) -> bytes | None:
        """What the id adds where it begins a text. None: the tokenizer does not know it, and it begins nothing."""
        return self._piece(token_id, begins=True)

    def _piece(self, token_id: int, *, begins: bool) -> bytes | None:
        content = self._verbatim.get(token_id)
        if content is not None:
            return content.encode()
        token = self._id_to_token(token_id)
        return None if token is None else self._decode(token, begins)


def load_tokenizer(folder: Path) -> "tokenizers.Tokenizer":
    """A model folder's tokenizer.json. Raises: ModelError."""
    import tokenizers  # not before a text is tokenised

    file = folder / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: missing") from None
    except Exception as error:  # the library raises no other class
        raise ModelError(f"{file}: {error}") from error


def special_ids(library: "tokenizers.Tokenizer") -> frozenset[int]:
    """The tokens that are marks, and no text."""
    return frozenset(token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special)


def pieces_of(library: "tokenizers.Tokenizer") -> Pieces:
    """Raises: ModelError for a decoder that is not supported."""
    added, model = library.get_added_tokens_decoder(), library.model
    verbatim = {token_id: token.content for token_id, token in added.items() if model.id_to_token(token_id) is None}
    return Pieces(_decoder_of(library), library.id_to_token, verbatim)


def _decoder_of(library: "tokenizers.Tokenizer") -> dict[str, Any] | None:
    """tokenizer.json's "decoder", by the pickling protocol: printing the whole tokenizer takes 0.1 s."""
    return None if library.decoder is None else json.loads(library.decoder.__getstate__())


def _make_decode(decoder: dict[str, Any] | None) -> _Decode:
    if decoder is None:
        return _decode_joined
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match steps:
        case [{"type": "ByteLevel"}]:
            return _decode_byte_level
        case [{"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleans_up)}]:
            return _WordPiece(prefix, cleans_up)
    return _make_sentencepiece(steps)


def _decode_joined(token: str, begins: bool) -> bytes:
    """Without a decoder: tokens are words, and a space stands between them."""
    return (token if begins else f" {token}").encode()


def _decode_byte_level(token: str, begins: bool) -> bytes:
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # such as a mark of its own for the end of a text: it stands for itself
        return token.encode()


@dataclass(frozen=True, slots=True)
class _WordPiece:
    """Words with spaces between them; what begins with the prefix ("##") goes on with the word before it."""

    prefix: str
    cleans_up: bool

    def __call__(self, token: str, begins: bool) -> bytes:
        if not begins:
            token = token.removeprefix(self.prefix) if token.startswith(self.prefix) else f" {token}"
        for old, new in _CLEAN_UP if self.cleans_up else ():
            token = token.replace(old, new)
        return token.encode()


@dataclass(frozen=True, slots=True)
class _Sentencepiece:
    """A mark ("▁") stands for a space, and tokens of single bytes may stand for what the vocabulary lacks."""

    byte_fallback: bool
    replacements: tuple[tuple[str, str, str], ...]  # what, by what, by what in a text's first token
    strip: str  # removed once from the start of a text

    def __call__(self, token: str, begins: bool) -> bytes:
        piece = _BYTE_TOKENS.get(token) if self.byte_fallback else None
        if piece is None:
            for old, new, new_first in self.replacements:
                token = token.replace(old, new_first if begins else new)
            piece = token.encode()
        return piece.removeprefix(self.strip.encode()) if begins else piece


def _make_sentencepiece(steps: Sequence[dict[str, Any]]) -> _Sentencepiece:
    """From the steps of a decoder: those that work on each token, in any order, then Fuse, then Strip."""
    byte_fallback = fused = False
    replacements: list[tuple[str, str, str]] = []
    strip = ""
    for step in steps:
        match step:
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)} if not fused:
                replacements.append((mark, " ", " " if scheme == "never" else ""))
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": 1, "stop": 0} if fused and not strip:
                strip = content
            case _:
                raise ModelError(f"tokenizer.json: decoder {step}: not supported{' here' * fused}")
    return _Sentencepiece(byte_fallback, tuple(replacements), strip)
