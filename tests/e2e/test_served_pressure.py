"""A router and a pair as processes, with more asked of them than they have room for."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.leaving import Call, Cluster, Standing, make_request
from support.oracle import Oracle, random_prompt
from support.pair import BLOCK
from support.roles import Client, Roles

from kvrelay.proto import inference_pb2_grpc
from kvrelay.router.answer import RETRY_HINT

pytestmark = pytest.mark.slow

MAX_WAITING = 60
LENGTH, MAX_TOKENS = 5 * BLOCK - 2, 12  # six blocks
NUM_PROMPTS = 12
MOST_TRIES = 30
OK = grpc.StatusCode.OK


@pytest.fixture(scope="module")
def processes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Room for one request and a block on either node."""
    roles = Roles(tiny_model, tmp_path_factory.mktemp("logs"))
    try:
        router = roles.start("router", "--port", "0", "--max-waiting", str(MAX_WAITING))
        where = ("--router", router.grpc, "--dtype", "float32", "--threads", "1")
        small = ("--num-blocks", "7", "--max-num-batched-tokens", "32")
        nodes = [roles.start(role, *where, *small) for role in ("prefill", "decode")]
        client = Client(router.grpc)
        client.wait_until_paired()
        client.close()
        yield router, *nodes
    finally:
        roles.close()


@pytest.fixture
async def cluster(processes: Any) -> AsyncIterator[Cluster]:
    cluster = Cluster(*processes)
    yield cluster
    await cluster.until(Standing().is_all)
    await cluster.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(LENGTH, seed=i) for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(tiny_oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    return [tiny_oracle.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_for_little_more_than_one_request_serves_fifty_who_wait(
    cluster: Cluster, prompts: list[list[int]], expected: list[list[int]], stream: bool
) -> None:
    async with asyncio.timeout(60):
        calls = [
            Call(cluster.channel, make_request(prompts[i % NUM_PROMPTS], max_tokens=MAX_TOKENS, stream=stream))
            for i in range(51)
        ]
        for i, call in enumerate(calls):
            assert await call.ended() is OK, call.details
            assert call.tokens == expected[i % NUM_PROMPTS]


@dataclass
class Customer:
    """Asks, and asks again when told to, if it has the patience."""

    index: int
    at_s: float
    timeout_s: float
    priority: int
    has_patience: bool
    tokens: list[int] = field(default_factory=list)
    hints_ms: list[int] = field(default_factory=list)
    code: grpc.StatusCode = OK

    async def come(self, channel: grpc.aio.Channel, prompt: Sequence[int]) -> None:
        await asyncio.sleep(self.at_s)
        for _ in range(MOST_TRIES if self.has_patience else 1):
            if await self._ask(channel, prompt):
                return
            await asyncio.sleep(self.hints_ms[-1] / 1000 if self.has_patience else 0)

    async def _ask(self, channel: grpc.aio.Channel, prompt: Sequence[int]) -> bool:
        """Returns: False if there was no room."""
        request = make_request(prompt, max_tokens=MAX_TOKENS, priority=self.priority)
        request.timeout_s = self.timeout_s
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        try:
            async for response in call:
                assert response.first_token_index == len(self.tokens)
                self.tokens += response.token_ids
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.hints_ms.append(int(dict(error.trailing_metadata())[RETRY_HINT]))
        self.code, details = await call.code(), await call.details()
        was_refused = self.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert was_refused == ("; try again in " in (details or ""))
        return not was_refused


async def test_under_overload_each_is_served_right_or_told_why_not(
    cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Four hundred come at times of their own, far faster than the pair can serve them; a fourth of them comes back."""
    rng = random.Random(1)
    customers = [
        Customer(
            index=rng.randrange(NUM_PROMPTS),
            at_s=rng.uniform(0.0, 2.0),
            timeout_s=rng.choice([0.2, 1.0, 60.0, 60.0]) if number % 4 else 60.0,
            priority=rng.choice([0, 0, 0, -1]),
            has_patience=number % 4 == 0,
        )
        for number in range(400)
    ]
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for customer in customers:
            group.create_task(customer.come(cluster.channel, prompts[customer.index]))
    codes = Counter(customer.code.name for customer in customers)
    print(codes, sorted(hint for customer in customers for hint in customer.hints_ms)[::20])
    assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert min(codes["OK"], codes["RESOURCE_EXHAUSTED"]) > 0  # on a fast machine nobody runs out of time
    for customer in customers:
        assert customer.tokens == expected[customer.index][: len(customer.tokens)]
        assert len(customer.tokens) == MAX_TOKENS or customer.code is not OK
        assert not customer.tokens or customer.code is not grpc.StatusCode.RESOURCE_EXHAUSTED
        assert all(100 <= hint <= 30_000 for hint in customer.hints_ms)
        assert customer.code is OK or not customer.has_patience
    assert any(customer.hints_ms for customer in customers if customer.has_patience)
    await cluster.until(Standing().is_all)
