"""Through router, prefill node and decode node, as processes: one engine's tokens, and transformers', bit for bit."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import Oracle
from support.roles import Client, RoleProcess, Roles
from tokenizers import Tokenizer

from kvrelay.engine import model_store
from kvrelay.proto import inference_pb2

pytestmark = pytest.mark.slow

BLOCK, CHUNK = 16, 32
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 5, 3 * BLOCK, 2 * CHUNK + 3]
CLOSE = 1e-3  # two logits nearer than this may swap places between two ways to add the same numbers
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "128", "--max-num-batched-tokens", str(CHUNK))


class Served:
    """A router, a prefill node and a decode node over one model."""

    def __init__(self, roles: Roles) -> None:
        self.router = roles.start("router", "--port", "0")
        nodes = [roles.start(role, "--router", self.router.grpc, *FLAGS) for role in ("prefill", "decode")]
        self.prefill, self.decode = nodes
        self.client = Client(self.router.grpc)
        self.client.wait_until_paired()

    def nodes(self) -> tuple[RoleProcess, RoleProcess]:
        return self.prefill, self.decode


def serve(model: Path, folder: Path) -> Iterator[Served]:
    roles = Roles(model, folder)
    try:
        served = Served(roles)
        yield served
        for node in served.nodes():
            node.wait_until_idle()
        served.client.close()
    finally:
        roles.close()


@pytest.fixture(scope="module")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tiny_model, tmp_path_factory.mktemp("tiny-logs"))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return model_store.resolve("smollm2")


@pytest.fixture(scope="module")
def real(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(smollm2, tmp_path_factory.mktemp("smollm2-logs"))


@pytest.fixture(scope="module")
def real_oracle(smollm2: Path) -> Iterator[Oracle]:
    oracle = Oracle(smollm2)
    yield oracle
    oracle.close()


def by_transformers(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens, and how far the best logit was ahead of the second for each."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    leads = [float(top[0, 0] - top[0, 1]) for top in (step.topk(2).values for step in generated.logits)]
    return generated.sequences[0, len(prompt) :].tolist(), leads


def check_against_transformers(folder: Path, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
    """Equal up to the first position where two logits are too close to call; most outputs have none."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    num_whole = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs, leads = by_transformers(model, prompt, len(output))
        first_close = next((i for i, lead in enumerate(leads) if lead < CLOSE), len(output))
        assert output[:first_close] == theirs[:first_close]
        num_whole += first_close == len(output)
    assert num_whole > len(prompts) / 2


def test_the_tiny_model_served_equals_one_engine_and_transformers(
    tiny: Served, tiny_model: Path, tiny_oracle: Oracle
) -> None:
    prompts = [[random.Random(n).randrange(256) for _ in range(n)] for n in [*LENGTHS, 127]]
    outputs = []
    for prompt in prompts:
        max_tokens = min(16, 128 - len(prompt))
        outcome = tiny.client.generate(prompt, max_tokens)
        assert outcome.tokens == tiny_oracle.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
        assert outcome.handoff == (max_tokens > 1)
        outputs.append(outcome.tokens)
    check_against_transformers(tiny_model, prompts, outputs)


def test_smollm2_served_equals_one_engine_and_transformers(real: Served, smollm2: Path, real_oracle: Oracle) -> None:
    text = "The relay race is run by teams of four, and the baton is handed from one runner to the next. " * 4
    ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids
    prompts = [ids[:n] for n in LENGTHS]
    outputs = []
    for prompt in prompts:
        outcome = real.client.generate(prompt, 8)
        assert outcome.tokens == real_oracle.generate(prompt, max_tokens=8, ignore_eos=True)
        assert outcome.handoff
        outputs.append(outcome.tokens)
    check_against_transformers(smollm2, prompts, outputs)


def test_streamed_text_joined_is_the_text_of_all_tokens(real: Served, smollm2: Path) -> None:
    """A14, C02, D08: nothing lost or doubled between the legs, nothing split."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    message = inference_pb2.ChatMessage(role="user", content="Repeat: 🙂 naïve 日本語 สวัสดี")
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[message]),
        sampling=inference_pb2.SamplingParams(max_tokens=24, temperature=0),
    )
    responses = real.client.stream(request)
    indexes = [response.first_token_index for response in responses if response.token_ids]
    ids = [token_id for response in responses for token_id in response.token_ids]
    assert indexes == sorted(set(indexes))
    assert [response.finish_reason for response in responses].count("") == len(responses) - 1
    text = "".join(response.text for response in responses)
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert responses[-1].usage.completion_tokens == len(ids)
    assert "\ufffd" not in text


def test_only_the_node_that_preempts_has_host_memory(tiny: Served) -> None:
    prefill, decode = (node.stats().swap for node in tiny.nodes())
    assert prefill.num_host_blocks == 0
    assert decode.num_free_host_blocks == decode.num_host_blocks > 0


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_max_tokens_is_exact_and_usage_agrees(tiny: Served, num_tokens: int) -> None:
    """A13."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=range(20)),
        sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True),
    )
    responses = tiny.client.stream(request)
    assert sum(len(response.token_ids) for response in responses) == num_tokens
    assert responses[-1].finish_reason == "length"
    assert responses[-1].usage.completion_tokens == num_tokens
    assert responses[-1].usage.prompt_tokens == 20
