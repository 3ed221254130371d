"""Which tokens a sequence has, for its penalties: counted once each, not at every step."""

from array import array
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor


class SeenTokens:
    """Of one sequence, with which it catches up: its tokens are only ever appended to."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_taken = 0
        self._known: set[int] = set()
        self._ids = array("q")
        self._places: dict[int, int] = {}  # of an output's token in the two below
        self._output_ids = array("q")
        self._output_counts = array("q")

    def catch_up(self, token_ids: Seq[int]) -> "SeenTokens":
        for position in range(self._num_taken, len(token_ids)):
            token_id = token_ids[position]
            if token_id not in self._known:
                self._known.add(token_id)
                self._ids.append(token_id)
            if position >= self._num_prompt_tokens:
                place = self._places.setdefault(token_id, len(self._places))
                if place == len(self._output_ids):
                    self._output_ids.append(token_id)
                    self._output_counts.append(0)
                self._output_counts[place] += 1
        self._num_taken = len(token_ids)
        return self

    def ids(self) -> Tensor:
        """int64 [tokens of prompt and output, each once]."""
        return _copied(self._ids)

    def output(self) -> tuple[Tensor, Tensor]:
        """The output's tokens, each once, and how often each is there: int64, of one length."""
        return _copied(self._output_ids), _copied(self._output_counts)


def _copied(numbers: "array[int]") -> Tensor:
    return torch.from_numpy(np.array(numbers))  # a view would keep the array from growing
