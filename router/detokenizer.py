"""Token ids to text as they come: whole characters only, stop strings held back. Bounded work a token.

The text is a function of the output tokens alone: nothing of the prompt shows, and how the tokens were cut into
deltas makes no difference.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.request import FinishReason, SamplingParams
from kvrelay.router.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Feeds the bytes of tokens to an incremental UTF-8 decoder; bytes that are no character become U+FFFD.

    `begins`: the tokens begin a text, so that a decoder's rule for its start (the space that a sentencepiece-like
    tokenizer put there) applies. It does not where they continue a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, begins: bool = False) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._begins = begins
        self._utf8 = _new_decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped:
            return ""
        if self._begins:
            self._begins = False
            return self._utf8.decode(self._pieces.first(token_id))
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        """U+FFFD where the output ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of these tokens, taken as a whole text."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, begins=True)
    return "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])


class StopString:
    """Looks for one stop string, a character at a time (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # the last characters of the text so far that begin the stop string
        self._fallback = [0]  # [i]: length of the longest proper end of text[: i + 1] that begins it too
        for character in text[1:]:
            self._fallback.append(self._advance(self._fallback[-1], character))

    def feed(self, character: str) -> bool:
        """Take a character in. Returns: whether it completes the stop string; nothing may be fed after that."""
        self.num_matched = self._advance(self.num_matched, character)
        return self.num_matched == len(self.text)

    def _advance(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens became: the text that is certain now, how many of them count, and the end if it was reached."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None


class OutputText:
    """One choice's text: detokenised, cut at its first stop string.

    A stop string counts from output token number `min_tokens` (from 1) on. The token that ended the choice (EOS or a
    stop id) shows no text, unless include_stop_str_in_output.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        self._stops = [StopString(text) for text in sampling.stop]
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held = ""

    def feed(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Take tokens in; `finish_reason` is why the choice ended with the last of them, if it did."""
        shown: list[str] = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            is_stop_token = finish_reason is FinishReason.STOP and i == len(token_ids) - 1
            if is_stop_token and not self._include_stop:
                continue
            if self._take(self._detokenizer.feed(token_id), shown):
                return Piece("".join(shown), i + 1, FinishReason.STOP)
        if finish_reason is not None:
            if self._take(self._detokenizer.flush(), shown):
                finish_reason = FinishReason.STOP
            else:
                shown.append(self._held)
        return Piece("".join(shown), len(token_ids), finish_reason)

    def _take(self, text: str, shown: list[str]) -> bool:
        """Append to `shown` what is certain of the text so far. Returns: whether a stop string ended it."""
        if not self._stops or self._num_tokens < self._min_tokens:
            shown.append(text)
            return False
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            # Where two end at one place, the longer one counts.
            length = max(len(stop.text) if stop.feed(text[end - 1]) else 0 for stop in self._stops)
            if length:
                shown.append(text[:end] if self._include_stop else text[: end - length])
                return True
        num_certain = len(text) - max(stop.num_matched for stop in self._stops)
        shown.append(text[:num_certain])
        self._held = text[num_certain:]
        return False
