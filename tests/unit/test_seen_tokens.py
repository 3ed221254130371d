"""What penalties count: the same step by step as at once."""

import random
from collections import Counter

from kvrelay.engine.seen_tokens import SeenTokens


def test_catching_up_by_any_steps_counts_what_is_there() -> None:
    rng = random.Random(1)
    for _ in range(50):
        num_prompt, tokens = rng.randrange(1, 30), [rng.randrange(12) for _ in range(60)]
        seen, length = SeenTokens(num_prompt), num_prompt
        while length < len(tokens):
            seen.catch_up(tokens[:length])
            ids, (output_ids, counts) = seen.ids().tolist(), seen.output()
            assert sorted(ids) == sorted(set(tokens[:length]))
            counted = dict(zip(output_ids.tolist(), counts.tolist(), strict=True))
            assert counted == Counter(tokens[num_prompt:length])
            length += rng.randrange(1, 4)


def test_nothing_is_counted_of_no_output() -> None:
    output_ids, counts = SeenTokens(3).catch_up([1, 2, 2]).output()
    assert (output_ids.tolist(), counts.tolist()) == ([], [])
