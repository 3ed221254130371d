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
from kvrelay.router.api import ChatMessage
from kvrelay.router.chat_template import ChatTemplate, find_chat_template
from kvrelay.router.pieces import Pieces

_INLINE_CHARACTERS = 2048  # a thread's hand-over costs as much as tokenising this


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
        self.pieces = Pieces(_decoder_of(library), library.id_to_token)
        self.special_ids = frozenset(
            token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, info: ModelInfo) -> "Tokenizer":
        """Read a model folder's tokenizer.json, tokenizer_config.json and chat template.

        Raises: ModelError.
        """
        file = info.path / "tokenizer.json"
        try:
            library = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{file}: missing") from None
        except Exception as error:  # the library raises no other class
            raise ModelError(f"{file}: {error}") from error
        config = _read_config(info.path / "tokenizer_config.json")
        return cls(
            library,
            bos_token_id=info.bos_token_id,
            add_bos_token=bool(config.get("add_bos_token")),
            chat_template=find_chat_template(info.path, config),
        )

    async def encode(self, text: str) -> list[int]:
        """A completion's prompt. Long texts are tokenised on a thread; the library lets go of the interpreter."""
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode_completion(text)
        return await asyncio.to_thread(self._encode_completion, text)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A chat's prompt: the template's text, tokenised as it stands.

        Raises: InvalidArgument if the model has no template, or its template does not accept the messages.
        """
        if self._chat_template is None:
            raise InvalidArgument("chat", f"{len(messages)} messages", "this model has no chat template")
        if sum(len(message.content) for message in messages) <= _INLINE_CHARACTERS:
            return self._encode_chat(self._chat_template, messages)
        return await asyncio.to_thread(self._encode_chat, self._chat_template, messages)

    def _encode_completion(self, text: str) -> list[int]:
        token_ids: list[int] = self._library.encode(text, add_special_tokens=True).ids
        bos = self._bos_token_id
        if bos is None:
            return token_ids
        if self._add_bos_token and token_ids[:1] != [bos]:
            return [bos, *token_ids]
        return token_ids[1:] if token_ids[:2] == [bos, bos] else token_ids

    def _encode_chat(self, template: ChatTemplate, messages: Sequence[ChatMessage]) -> list[int]:
        token_ids: list[int] = self._library.encode(template.render(messages), add_special_tokens=False).ids
        return token_ids


def _decoder_of(library: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """tokenizer.json's "decoder", by the pickling protocol: printing the whole tokenizer takes 0.1 s."""
    return None if library.decoder is None else json.loads(library.decoder.__getstate__())


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
