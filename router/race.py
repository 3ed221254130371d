"""One attempt at one request: what its legs have said, merged. Pure: no clock, no waiting, no sending.

Both legs tell of the same choices: the prefill node of each one's output token 0 and of the prompt's
log-probabilities, the decode node of all tokens from 0 on. Everything goes by its choice and index, so that it counts
once whichever way and in whichever order it comes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.errors import Internal, KvrelayError, RemoteError, Unavailable
from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.request import FinishReason, Logprobs, Request, SamplingParams

_MAX_POSITIONS = 1024  # of a prompt, whose log-probabilities are taken at once


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What is new of one choice: tokens from output index `first_index` on, or its end, or both."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list[Logprobs]  # one a token, where asked for
    finish_reason: FinishReason | None


class Race:
    """The state of an attempt. It is over when every choice has ended and the prompt's log-probabilities are in, or
    with an error, whichever comes first; late words change nothing. Memory is bounded by n * max_tokens and the
    prompt's length, whatever the nodes say."""

    def __init__(self, legs: Mapping[str, Leg], request: Request) -> None:
        """`legs`: by the epoch of the node that runs each."""
        self.open_legs = dict(legs)
        # The prefill node, until its first word, which says how the first token came to be: the last ends wait for it.
        self._awaited = {epoch for epoch, leg in legs.items() if leg is Leg.PREFILL}
        self.reports: dict[Leg, LegReport] = {}
        self.error: KvrelayError | None = None
        self._request = request
        self._choices = [_Choice(index) for index in range(request.sampling.n)]
        self._num_open_choices = request.sampling.n
        self._prompt_logprobs: list[Logprobs] = []  # those that were not taken yet
        self._num_prompt_known = 0
        asks_for_prompt = request.sampling.prompt_logprobs is not None
        self._num_prompt_wanted = len(request.prompt_token_ids) if asks_for_prompt else 0

    @property
    def is_over(self) -> bool:
        return self.error is not None or (self._num_open_choices == 0 and self._prompt_is_known)

    def receive(self, epoch: str, delta: Delta) -> bool:
        """Take a node's word in. Returns: False if this node has no open leg here (it came late)."""
        leg = self.open_legs.get(epoch)
        if leg is None:
            return False
        if delta.report is not None:
            self.reports.setdefault(leg, delta.report)
        if delta.token_ids or delta.report is not None or delta.ended:
            self._awaited.discard(epoch)
        if not self.is_over:
            try:
                self._merge(delta)
            except Internal as error:
                self.error = error
        if delta.error is not None:
            self._fail(epoch, delta.error)
        elif delta.ended:
            del self.open_legs[epoch]
        self._settle()
        return True

    def lose(self, epoch: str, error: KvrelayError) -> bool:
        """A node is gone. Returns: whether it ran a leg here."""
        if epoch not in self.open_legs:
            return False
        self._fail(epoch, error)
        self._settle()
        return True

    def stop(self, choice: int) -> bool:
        """End a choice from the router's side: what is not taken yet and what still comes is dropped.

        Returns: whether the nodes may still be at it.
        """
        was_open = self._choices[choice].stop()
        self._num_open_choices -= was_open
        if was_open:
            self._awaited.clear()
        return was_open

    def abort(self, error: KvrelayError) -> None:
        """End the attempt from the router's side; its legs stay open, and are to be cancelled."""
        self._awaited.clear()
        if not self.is_over:
            self.error = error

    def take_prompt_logprobs(self) -> tuple[int, list[Logprobs]]:
        """Some that are new, and the prompt index of the first of them; to be called until there are none."""
        first = self._num_prompt_known - len(self._prompt_logprobs)
        taken = self._prompt_logprobs[:_MAX_POSITIONS]
        del self._prompt_logprobs[:_MAX_POSITIONS]
        return first, taken

    def take(self) -> list[NewTokens]:
        """What is new of each choice. Nothing before all of the prompt's log-probabilities have been taken.

        Where the decode node has told all before the prefill node's first word is here, the last ends are held back for
        it: it is on its way, or the node's loss will be known, and only it says what the prefix cache held.
        """
        if not self._prompt_is_known or self._prompt_logprobs:
            return []
        holds_ends = bool(self._awaited) and not self._num_open_choices
        return [new for choice in self._choices if (new := choice.take(holds_end=holds_ends)) is not None]

    @property
    def _prompt_is_known(self) -> bool:
        return self._num_prompt_known == self._num_prompt_wanted

    def _merge(self, delta: Delta) -> None:
        """Raises: Internal for what contradicts the request, or an earlier word."""
        if not 0 <= delta.choice < len(self._choices):
            raise Internal(f"choice {delta.choice} of {len(self._choices)}")
        if delta.prompt_logprobs:
            if self._request.sampling.prompt_logprobs is None:
                raise Internal("log-probabilities of a prompt that nobody asked for")
            self._merge_prompt(delta.first_prompt_index, delta.prompt_logprobs)
        choice = self._choices[delta.choice]
        if not choice.is_over:
            choice.merge(delta, self._request.sampling)
            self._num_open_choices -= choice.is_over

    def _merge_prompt(self, first: int, logprobs: tuple[Logprobs, ...]) -> None:
        prompt, num_known, end = self._request.prompt_token_ids, self._num_prompt_known, first + len(logprobs)
        if first > num_known or end > len(prompt):
            raise Internal(f"log-probabilities of prompt tokens [{first}, {end}) of {len(prompt)} after {num_known}")
        if first == 0:  # before a prompt's first token there is nothing
            if logprobs[0] != Logprobs():
                raise Internal("log-probabilities of a prompt's first token")
            _check(logprobs[1:], prompt[1:end], self._request.sampling.prompt_logprobs)
        else:
            _check(logprobs, prompt[first:end], self._request.sampling.prompt_logprobs)
        self._prompt_logprobs.extend(logprobs[num_known - first :])
        self._num_prompt_known = max(num_known, end)

    def _fail(self, epoch: str, error: KvrelayError) -> None:
        """End a leg with an error, which is the attempt's too; only a prefill leg that has told all can be spared."""
        leg = self.open_legs.pop(epoch)
        self._awaited.discard(epoch)
        has_told = self._prompt_is_known and all(choice.is_over or choice.token_ids for choice in self._choices)
        if not self.is_over and not (leg is Leg.PREFILL and has_told):
            self.error = _explain(leg, error)

    def _settle(self) -> None:
        """See that what is still open can bring the output to its end: a leg that decodes, or a prefill leg that has
        not told its token yet (a decode leg that ended first had nothing to do: that token is the last)."""
        legs = self.open_legs.values()
        if self._prompt_is_known and (Leg.DECODE in legs or Leg.WHOLE in legs):
            return  # the usual case, once a token
        prefills, decodes, does_both = Leg.PREFILL in legs, Leg.DECODE in legs, Leg.WHOLE in legs
        prompt_can = self._prompt_is_known or prefills or does_both
        choices_can = (
            decodes
            or does_both
            or all(choice.is_over or (prefills and not choice.token_ids) for choice in self._choices)
        )
        if not self.is_over and not (prompt_can and choices_can):
            self.error = Internal("every leg ended, and the output did not")


@dataclass(slots=True)
class _Choice:
    """One choice's output."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    num_taken: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)  # of the tokens that were not taken yet
    finish_reason: FinishReason | None = None  # until it is taken
    is_over: bool = False

    def merge(self, delta: Delta, sampling: SamplingParams) -> None:
        first, num_known = delta.first_token_index, len(self.token_ids)
        end = first + len(delta.token_ids)
        known = self.token_ids[first:end]
        if first > num_known or end > sampling.max_tokens:
            raise Internal(f"choice {self.index}: tokens [{first}, {end}) came after {num_known} tokens")
        if delta.token_ids[: len(known)] != tuple(known):
            raise Internal(f"choice {self.index}: the legs differ in tokens [{first}, {first + len(known)})")
        _check(delta.logprobs, delta.token_ids, sampling.logprobs)
        if delta.finish_reason is not None and end < num_known:
            raise Internal(f"choice {self.index}: finished after {end} tokens, with {num_known} known")
        self.token_ids.extend(delta.token_ids[len(known) :])
        self.logprobs.extend(delta.logprobs[len(known) :])
        self.finish_reason = delta.finish_reason
        self.is_over = delta.finish_reason is not None

    def take(self, *, holds_end: bool) -> NewTokens | None:
        """What is new; with `holds_end` the end stays for another time."""
        first, end = self.num_taken, self.finish_reason
        said_end = None if holds_end else end
        if first == len(self.token_ids) and said_end is None:
            return None
        new = NewTokens(self.index, first, self.token_ids[first:], self.logprobs, said_end)
        self._forget_untaken()
        if holds_end:
            self.finish_reason = end
        return new

    def stop(self) -> bool:
        was_over, self.is_over = self.is_over, True
        self._forget_untaken()
        return not was_over

    def _forget_untaken(self) -> None:
        self.num_taken, self.logprobs, self.finish_reason = len(self.token_ids), [], None


def _check(logprobs: Sequence[Logprobs], token_ids: Sequence[int], num_likeliest: int | None) -> None:
    """Raises: Internal unless there is one entry a token: itself, and as many of the likeliest as were asked for."""
    if num_likeliest is None:
        if logprobs:
            raise Internal("log-probabilities that nobody asked for")
        return
    size = 1 + num_likeliest
    if len(logprobs) != len(token_ids):
        raise Internal(f"log-probabilities of {len(logprobs)} tokens, with {len(token_ids)} tokens")
    for entry, token_id in zip(logprobs, token_ids, strict=True):
        if len(entry.token_ids) != size or len(entry.logprobs) != size or entry.token_ids[0] != token_id:
            raise Internal(f"log-probabilities of {len(entry.token_ids)} tokens instead of token {token_id}'s {size}")


def _explain(leg: Leg, error: KvrelayError) -> KvrelayError:
    """A leg's error as the client gets it: a retryable one is UNAVAILABLE, any other keeps its own code."""
    message = f"the {leg} leg failed: {error.message}"
    return Unavailable(message) if error.retryable else RemoteError(error.code, message, retryable=False)
