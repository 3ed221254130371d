"""Token ids to text as they come: whole characters only, stop strings held back. Bounded work a token.

The text is a function of the output tokens, and of whether they begin a text, alone: nothing of the prompt shows, and
how the tokens were cut into deltas makes no difference.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.request import FinishReason, Request, SamplingParams
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
            piece = self._pieces.first(token_id)
            self._begins = piece is None
            return self._utf8.decode(piece or b"")
        return self._utf8.decode(self._pieces[token_id])

    def flush(self) -> str:
        """U+FFFD where the output ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of these tokens, taken as a whole text."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, begins=True)
    return "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])


class StopStrings:
    """A request's stop strings as one automaton (Aho and Corasick): a character costs the same for one as for many.

    A state stands for the longest end of the text so far that begins a stop string; 0 stands for none. Its choices
    share it: it does not change.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # of each state: what one more character of a stop string leads to
        self._fallback = [0]  # of each state: the next longest end that begins a stop string
        self.num_held = [0]  # of each state: the number of characters that it stands for
        self.length_found = [0]  # of each state: the length of the longest stop string that ends there, or 0
        for text in texts:
            self._add(text)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following

    def pass_over(self, state: int) -> int:
        """The state in which a stop string that was found, and does not count, holds back nothing any more."""
        while not self._next[state]:
            state = self._fallback[state]
        return state

    def _add(self, text: str) -> None:
        state = 0
        for num_characters, character in enumerate(text, 1):
            following = self._next[state].setdefault(character, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._fallback.append(0)
                self.num_held.append(num_characters)
                self.length_found.append(0)
            state = following
        self.length_found[state] = len(text)

    def _link(self) -> None:
        """Fill in the fallbacks, shorter states first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, following in self._next[state].items():
                fallback = self._fallback[following] = self.advance(self._fallback[state], character)
                self.length_found[following] = self.length_found[following] or self.length_found[fallback]
                states.append(following)


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens became: the text that is certain now, how many of them count, and the end if it was reached."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None


class OutputText:
    """One choice's text: detokenised, cut at its first stop string.

    A stop string counts if output token number `min_tokens` (from 1) or a later one ends it. The token that ended the
    choice (EOS or a stop id) shows no text, unless include_stop_str_in_output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        begins: bool = False,
        stops: StopStrings | None = None,
    ) -> None:
        """`begins`: the output begins a text (see Detokenizer). `stops`: made of `sampling.stop`, if it was before."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens, begins=begins)
        self._stops = StopStrings(sampling.stop) if stops is None else stops
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._state = 0
        self._held = ""  # the characters that the state stands for

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
        if finish_reason is FinishReason.COMPLETE:
            finish_reason = FinishReason.STOP
        return Piece("".join(shown), len(token_ids), finish_reason)

    def _take(self, text: str, shown: list[str]) -> bool:
        """Append to `shown` what is certain of the text so far. Returns: whether a stop string ended it."""
        stops, state = self._stops, self._state
        if not stops:
            shown.append(text)
            return False
        num_held, text = len(self._held), self._held + text
        for end in range(num_held + 1, len(text) + 1):
            state = stops.advance(state, text[end - 1])
            length = stops.length_found[state]
            if length and self._num_tokens >= self._min_tokens:
                shown.append(text[:end] if self._include_stop else text[: end - length])
                return True
            if length:
                state = stops.pass_over(state)
        num_certain = len(text) - stops.num_held[state]
        shown.append(text[:num_certain])
        self._state, self._held = state, text[num_certain:]
        return False


def make_output_texts(tokenizer: Tokenizer, request: Request) -> list[OutputText]:
    """One for each of a request's choices."""
    sampling, pieces = request.sampling, tokenizer.pieces
    skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
    # After a prompt that shows nothing, such as BOS alone, the output begins the text.
    begins = not any(pieces[token_id] for token_id in request.prompt_token_ids if token_id not in skipped)
    stops = StopStrings(sampling.stop)
    return [OutputText(tokenizer, sampling, begins=begins, stops=stops) for _ in range(sampling.n)]
