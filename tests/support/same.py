"""What two nodes said of a request against what one engine by itself makes of it."""

from support.oracle import OracleAnswer
from support.pair import Answer


def assert_same(answer: Answer, expected: OracleAnswer) -> None:
    """Tokens, ends and log-probabilities, bit for bit."""
    assert not answer.errors
    assert answer.prompt_logprobs == expected.prompt_logprobs
    assert sorted(answer.choices) == sorted(expected.choices)
    for choice, tokens in expected.choices.items():
        ours = answer.choices[choice]
        assert ours.tokens[ours.num_resumed :] == [token.token_id for token in tokens]
        assert ours.logprobs == [token.logprobs for token in tokens if token.logprobs is not None]
        assert ours.finish_reason == tokens[-1].finish_reason
