"""What each token id adds to the text, as bytes: tokenizer.json's decoder, one token at a time.

Bytes, not text: a token of a byte-level vocabulary may hold half a character. The decoders of the families in use
work token by token but for one rule at the very start of a text (`first`). Any other decoder is refused by name.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from kvrelay.engine.errors import ModelError

_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters for
    themselves, the characters from U+0100 on for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Pieces(dict[int, bytes]):
    """token id -> bytes, worked out at first use. Ids that the tokenizer does not know add nothing."""

    def __init__(self, decoder: dict[str, Any] | None, id_to_token: Callable[[int], str | None]) -> None:
        """Raises: ModelError for a decoder that is not supported."""
        super().__init__()
        self._id_to_token = id_to_token
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._strip_start = ""  # removed once from the start of a text
        self._drop_at_start = ""  # every one in a text's first token is removed
        for step in _steps(decoder):
            self._add_step(step)

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._decode(token)
        return piece

    def first(self, token_id: int) -> bytes:
        """What the id adds where it begins a text."""
        token = self._id_to_token(token_id)
        if token is not None and self._drop_at_start:
            return self._decode(token.replace(self._drop_at_start, ""))
        return self[token_id].removeprefix(self._strip_start.encode())

    def _decode(self, token: str) -> bytes:
        if self._byte_level:
            alphabet = byte_level_alphabet()
            values = [alphabet.get(character) for character in token]
            # An added token may hold characters outside the alphabet: it stands for itself.
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and token in _BYTE_TOKENS:
            return _BYTE_TOKENS[token]
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def _add_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                self._drop_at_start = mark if step.get("prepend_scheme") != "never" else ""
            case {"type": "Strip", "content": str(content), "start": 0 | 1 as start, "stop": 0}:
                self._strip_start = content * start
            case _:
                raise ModelError(f"tokenizer.json: decoder {step}: not supported")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelError("tokenizer.json: no decoder: not supported")
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]
