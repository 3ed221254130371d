"""One attempt at one request: what its legs have said, merged. Pure: no clock, no waiting, no sending.

Both legs tell of the same choice: the prefill node of output token 0, the decode node of all tokens from 0 on. Tokens
go by their index, so that each counts once whichever way and in whichever order it comes.
"""

from collections.abc import Mapping

from kvrelay.engine.errors import Internal, KvrelayError, RemoteError, Unavailable
from kvrelay.engine.legs import Delta, Leg, LegReport
from kvrelay.engine.request import FinishReason


class Race:
    """The state of an attempt. It is over with a finish reason or an error, whichever comes first; late words change
    nothing. Memory is bounded by max_tokens, whatever the nodes say."""

    def __init__(self, legs: Mapping[str, Leg], max_tokens: int) -> None:
        """`legs`: by the epoch of the node that runs each."""
        self.open_legs = dict(legs)
        self.reports: dict[Leg, LegReport] = {}
        self.finish_reason: FinishReason | None = None
        self.error: KvrelayError | None = None
        self._token_ids: list[int] = []
        self._num_taken = 0
        self._max_tokens = max_tokens

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def receive(self, epoch: str, delta: Delta) -> bool:
        """Take a node's word in. Returns: False if this node has no open leg here (it came late)."""
        leg = self.open_legs.get(epoch)
        if leg is None:
            return False
        if delta.report is not None:
            self.reports.setdefault(leg, delta.report)
        if not self.is_over:
            self._merge(delta)
            self._settle()
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
        return True

    def abort(self, error: KvrelayError) -> None:
        """End the attempt from the router's side; its legs stay open, and are to be cancelled."""
        if not self.is_over:
            self.error = error

    def take(self) -> tuple[int, list[int]]:
        """The tokens since the last call, and the output index of the first of them."""
        first = self._num_taken
        self._num_taken = len(self._token_ids)
        return first, self._token_ids[first:]

    def _merge(self, delta: Delta) -> None:
        first, num_known = delta.first_token_index, len(self._token_ids)
        end = first + len(delta.token_ids)
        known = self._token_ids[first:end]
        if delta.choice != 0 or first > num_known or end > self._max_tokens:
            self.error = Internal(f"choice {delta.choice}, tokens [{first}, {end}) came after {num_known} tokens")
        elif delta.token_ids[: len(known)] != tuple(known):
            self.error = Internal(f"the legs differ in tokens [{first}, {first + len(known)})")
        else:
            self._token_ids.extend(delta.token_ids[len(known) :])
            if delta.finish_reason is not None:
                self._finish(delta.finish_reason, end)

    def _finish(self, reason: FinishReason, num_tokens: int) -> None:
        if num_tokens == len(self._token_ids):
            self.finish_reason = reason
        else:
            self.error = Internal(f"finished after {num_tokens} tokens, with {len(self._token_ids)} known")

    def _fail(self, epoch: str, error: KvrelayError) -> None:
        """End a leg with an error, which is the attempt's too; only a prefill leg whose token is out can be spared."""
        leg = self.open_legs.pop(epoch)
        if not self.is_over and not (leg is Leg.PREFILL and self._token_ids):
            self.error = _explain(leg, error)
        self._settle()

    def _settle(self) -> None:
        """See that what is still open can bring the output to its end: a leg that decodes, or a prefill leg that has
        not told its token yet (a decode leg that ended first had nothing to do: that token is the last)."""
        legs = self.open_legs.values()
        can_go_on = Leg.DECODE in legs or Leg.WHOLE in legs or (Leg.PREFILL in legs and not self._token_ids)
        if not self.is_over and not can_go_on:
            self.error = Internal("every leg ended, and the output did not")


def _explain(leg: Leg, error: KvrelayError) -> KvrelayError:
    """A leg's error as the client gets it: a retryable one is UNAVAILABLE, any other keeps its own code."""
    message = f"the {leg} leg failed: {error.message}"
    return Unavailable(message) if error.retryable else RemoteError(error.code, message, retryable=False)
