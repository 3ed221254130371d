"""Text to token ids, for completions and chats, by the `tokenizers` library over tokenizer.json.

BOS stands once: a completion gets it from the tokenizer's own post-processor, or by hand where tokenizer_config.json
asks for it; a text that already spells it keeps the one it has; a chat has the one that its template wrote.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.engine.errors import InvalidArgument, ModelError
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.pieces import load_tokenizer, pieces_of, special_ids
from kvrelay.router.api import ChatMessage
from kvrelay.router.chat_template import ChatTemplate, find_chat_template

_INLINE_CHARACTERS = 2048  # a thread's hand-over costs as much as tokenising this
_TURN_CHARACTERS = 16  # what a template puts around a message, about
_PROBE_CHARACTERS = 8  # a token, more than most texts have


class Tokenizer:
    """One model's tokenizer. Its methods may run on several threads at once."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        add_bos_token: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._bos_token_id = bos_token_id
        self._add_bos_token = add_bos_token
        self._chat_template = chat_template
        self.pieces = pieces_of(library)
        self.special_ids = special_ids(library)

    @classmethod
    def load(cls, info: ModelInfo) -> "Tokenizer":
        """Read a model folder's tokenizer.json, tokenizer_config.json and chat template.

        Raises: ModelError.
        """
        library = load_tokenizer(info.path)
        config = _read_config(info.path / "tokenizer_config.json")
        return cls(
            library,
            bos_token_id=info.bos_token_id,
            add_bos_token=bool(config.get("add_bos_token")),
            chat_template=find_chat_template(info.path, config),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    async def encode(self, text: str, *, at_most: int | None = None) -> list[int]:
        """A completion's prompt. Long texts are tokenised on a thread; the library lets go of the interpreter.

        Raises: InvalidArgument for a text so long that its beginning shows it to have over `at_most` tokens; one that
        has a few more than that comes back.
        """
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode_completion(text)
        return await asyncio.to_thread(self._encode_completion, text, at_most)

    async def encode_chat(self, messages: Sequence[ChatMessage], *, at_most: int | None = None) -> list[int]:
        """A chat's prompt: the template's text, tokenised as it stands.

        Raises: InvalidArgument if the model has no template, its template does not accept the messages, or as `encode`.
        """
        if self._chat_template is None:
            raise InvalidArgument("chat", f"{len(messages)} messages", "this model has no chat template")
        if sum(len(message.content) + _TURN_CHARACTERS for message in messages) <= _INLINE_CHARACTERS:
            return self._encode_chat(self._chat_template, messages)
        return await asyncio.to_thread(self._encode_chat, self._chat_template, messages, at_most)

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell these words: each word as it stands and behind a space, every sequence once.

        Raises: InvalidArgument for a word that becomes no tokens.
        """
        if sum(map(len, words)) <= _INLINE_CHARACTERS:
            return self._encode_bad_words(words)
        return await asyncio.to_thread(self._encode_bad_words, words)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """As a batch of one: the library lets go of the interpreter for batches, and for nothing else."""
        (encoding,) = self._library.encode_batch([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def _encode_completion(self, text: str, at_most: int | None = None) -> list[int]:
        self._check_length(text, at_most)
        token_ids = self._encode(text, add_special_tokens=True)
        bos = self._bos_token_id
        if bos is None:
            return token_ids
        if self._add_bos_token and token_ids[:1] != [bos]:
            return [bos, *token_ids]
        return token_ids[1:] if token_ids[:2] == [bos, bos] else token_ids

    def _encode_chat(
        self, template: ChatTemplate, messages: Sequence[ChatMessage], at_most: int | None = None
    ) -> list[int]:
        text = template.render(messages)
        self._check_length(text, at_most)
        return self._encode(text)

    def _check_length(self, text: str, at_most: int | None) -> None:
        """Refuse a text many times too long without tokenising all of it. What follows a beginning changes its tokens
        near its end only: one that has half as many again as are allowed decides for the whole."""
        if at_most is None or len(text) <= 2 * _PROBE_CHARACTERS * at_most:
            return
        beginning = text[: _PROBE_CHARACTERS * at_most]
        if 2 * len(self._encode(beginning)) > 3 * at_most:
            raise InvalidArgument("prompt", f"more than {at_most} tokens", f"at most {at_most}")

    def _encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}  # a set that keeps the order
        for i, word in enumerate(words):
            bare = word.lstrip(" ")
            spelled = [tuple(self._encode(text)) for text in (bare, f" {bare}")]
            if not all(spelled):
                raise InvalidArgument(f"bad_words[{i}]", word, "becomes no tokens")
            found.update(dict.fromkeys(spelled))
        return tuple(found)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return config
