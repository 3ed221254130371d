"""Every sampling parameter through router, prefill node and decode node, as processes, streamed and whole: what one
engine makes of the same request, bit for bit."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.mixtures import as_form, random_request
from support.oracle import Oracle, OracleAnswer
from support.roles import Client, Roles
from tokenizers import Tokenizer

from kvrelay.engine.request import Logprobs, Request
from kvrelay.proto import inference_pb2 as pb

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--max-num-batched-tokens", "32")
WORDS = ("hell", "the", "in", "an the", "on", "é")
FIELDS = (
    "max_tokens",
    "min_tokens",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
)


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    roles = Roles(tiny_model, tmp_path_factory.mktemp("logs"))
    try:
        router = roles.start("router", "--port", "0")
        nodes = [roles.start(role, "--router", router.grpc, *FLAGS) for role in ("prefill", "decode")]
        client = Client(router.grpc)
        client.wait_until_paired()
        yield client
        for node in nodes:
            node.wait_until_idle()
        client.close()
    finally:
        roles.close()


def as_message(request: Request, bad_words: list[str], *, stream: bool) -> pb.GenerateRequest:
    sampling = request.sampling
    given = {name: getattr(sampling, name) for name in FIELDS if getattr(sampling, name) is not None}
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=request.prompt_token_ids),
        sampling=pb.SamplingParams(
            **given,
            logit_bias=dict(sampling.logit_bias),
            bad_words=bad_words,
            structured_output=as_form(sampling.structured_output),
        ),
        priority=request.priority,
        stream=stream,
    )


def joined(
    responses: list[pb.GenerateResponse],
) -> tuple[dict[int, tuple[list[int], list[Logprobs], str]], list[Logprobs]]:
    """Each choice's tokens, log-probabilities and finish, and the prompt's log-probabilities, which come first."""
    choices: dict[int, tuple[list[int], list[Logprobs], str]] = {}
    prompt: list[Logprobs] = []
    for response in responses:
        token_ids, logprobs, finish_reason = choices.setdefault(response.choice, ([], [], ""))
        assert not finish_reason, "more after the finish"
        if response.prompt_logprobs:
            assert response.first_prompt_index == len(prompt)
            assert not any(tokens for tokens, _, _ in choices.values()), "the prompt's come before the first token"
            prompt += [Logprobs(tuple(p.token_ids), tuple(p.logprobs)) for p in response.prompt_logprobs]
        if response.token_ids:
            assert response.first_token_index == len(token_ids)
        token_ids += response.token_ids
        logprobs += [Logprobs(tuple(p.token_ids), tuple(p.logprobs)) for p in response.logprobs]
        choices[response.choice] = (token_ids, logprobs, response.finish_reason)
    return choices, prompt


def expected_of(answer: OracleAnswer) -> tuple[dict[int, tuple[list[int], list[Logprobs], str]], list[Logprobs]]:
    choices = {
        choice: (
            [token.token_id for token in tokens],
            [token.logprobs for token in tokens if token.logprobs is not None],
            str(tokens[-1].finish_reason).replace("complete", "stop"),
        )
        for choice, tokens in answer.choices.items()
    }
    return choices, answer.prompt_logprobs


@pytest.mark.parametrize("stream", [True, False])
def test_any_mixture_is_served_as_one_engine_would(
    client: Client, tiny_model: Path, tiny_oracle: Oracle, stream: bool
) -> None:
    """Forty requests at once, each alone on one engine as the oracle."""
    rng = random.Random(f"served-{stream}")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    messages: list[pb.GenerateRequest] = []
    expected = []
    for i in range(40):
        request = random_request(rng, i)
        words = [] if request.sampling.structured_output else rng.sample(WORDS, rng.choice([0, 0, 3]))
        spellings = [tokenizer.encode(text, add_special_tokens=False).ids for w in words for text in (w, f" {w}")]
        sampling = replace(request.sampling, bad_word_ids=tuple(map(tuple, spellings)))
        request = replace(request, sampling=sampling)
        messages.append(as_message(request, words, stream=stream))
        expected.append(expected_of(tiny_oracle.answer(request)))
    with ThreadPoolExecutor(len(messages)) as threads:
        answers = list(threads.map(client.stream, messages))
    for message, responses, wanted in zip(messages, answers, expected, strict=True):
        assert joined(responses) == wanted, message
        usage = responses[-1].usage
        assert usage.completion_tokens == sum(len(token_ids) for token_ids, _, _ in wanted[0].values())
        assert [response.HasField("usage") for response in responses[:-1]] == [False] * (len(responses) - 1)
        assert stream or len(responses) == message.sampling.n
