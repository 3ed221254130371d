"""The other end of engine.py: a process that holds one engine and measures when it is told to.

Engines run in virtual environments of their own, so this imports the standard library alone. A line of JSON in, a
line of JSON out; whatever an engine prints goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """One engine with a model in it."""

    about: str  # what computes, in one line

    def decode(self, prompts: Prompts, num_steps: int) -> float:
        """One pass: from where all sequences have a token until each has `num_steps` more. Returns: tokens a second.

        The prompts of the pass before need not be computed again.
        """
        ...

    def prefill(self, prompt: Sequence[int]) -> float:
        """One prompt that is in no cache, alone, to its first token. Returns: tokens of the prompt a second."""
        ...


def serve(load: Callable[[str, int], Engine]) -> None:
    """Load the engine with the arguments MODEL and THREADS, and measure until standard input ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        engine = load(sys.argv[1], int(sys.argv[2]))
        print(json.dumps({"about": engine.about}), file=out)
        for line in sys.stdin:
            asked = json.loads(line)
            prompts = asked["prompts"]
            rate = engine.decode(prompts, asked["num_steps"]) if asked["num_steps"] else engine.prefill(prompts[0])
            print(json.dumps({"tokens_per_s": rate}), file=out)
