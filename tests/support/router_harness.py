"""A real router in this process, on a loopback port, with fake nodes and real clients around it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from support.fake_node import DECODE, PREFILL, FakeNode

from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.model_info import ModelInfo
from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc
from kvrelay.router.config import RouterConfig
from kvrelay.router.server import RouterServer


async def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  conditions of many kinds, none with an event of its own
            await asyncio.sleep(0.001)


@dataclass
class Answer:
    """What a client received."""

    responses: list[pb.GenerateResponse] = field(default_factory=list)

    def of(self, choice: int) -> "Answer":
        """One choice's share."""
        return Answer([response for response in self.responses if response.choice == choice])

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice: in order, each once."""
        for i, response in enumerate(self.responses):
            assert response.first_token_index == sum(len(r.token_ids) for r in self.responses[:i])
        return [token_id for response in self.responses for token_id in response.token_ids]

    @property
    def logprobs(self) -> list[pb.Logprobs]:
        return [entry for response in self.responses for entry in response.logprobs]

    @property
    def prompt_logprobs(self) -> list[pb.Logprobs]:
        """In order, each once, and none behind the first token."""
        found: list[pb.Logprobs] = []
        for i, response in enumerate(self.responses):
            if response.prompt_logprobs:
                assert response.first_prompt_index == len(found)
                assert not any(r.token_ids or r.finish_reason for r in self.responses[:i])
                found.extend(response.prompt_logprobs)
        return found

    @property
    def finish_reasons(self) -> dict[int, str]:
        """By choice, each on its last response; what the request took is on the very last one, and nowhere else."""
        assert [response.HasField("usage") for response in self.responses] == [False] * (len(self.responses) - 1) + [
            True
        ]
        return {choice: self.of(choice).last.finish_reason for choice in {r.choice for r in self.responses}}

    @property
    def last(self) -> pb.GenerateResponse:
        assert [bool(response.finish_reason) for response in self.responses] == [False] * (len(self.responses) - 1) + [
            True
        ]
        return self.responses[-1]


class Harness:
    """The router and the ways to it."""

    def __init__(
        self, server: RouterServer, info: ModelInfo, address: str, channel: grpc.aio.Channel, http_url: str
    ) -> None:
        self.server = server
        self.info = info
        self.address = address
        self.channel = channel
        self.http_url = http_url
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self._stack = contextlib.AsyncExitStack()

    async def node(self, role: Any, name: str, **more: Any) -> FakeNode:
        """A node that stays until the test ends, or dies."""
        node = FakeNode(role, self.info, name, **more)
        await self._stack.enter_async_context(node.connected(self.address))
        return node

    async def pair(self) -> tuple[FakeNode, FakeNode]:
        """A prefill and a decode node with a session between them, seen by the router."""
        decode = await self.node(DECODE, "D")
        prefill = await self.node(PREFILL, "P")
        await prefill.wait_peers(decode.epoch)
        await prefill.say_load(sessions=[decode.epoch])
        await wait_until(lambda: any(decode.epoch in node.load.sessions for node in self.server.registry))
        return prefill, decode

    def call(self, prompt: list[int] | str = "Where is Rome?", *, timeout: float = 10, **more: Any) -> Any:
        """An open Generate call."""
        sampling = pb.SamplingParams(**more.pop("sampling", {"max_tokens": 8}))
        request = pb.GenerateRequest(sampling=sampling, **more)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.stub.Generate(request, timeout=timeout)

    async def generate(self, prompt: list[int] | str = "Where is Rome?", **more: Any) -> Answer:
        return Answer([response async for response in self.call(prompt, **more)])

    async def assert_idle(self) -> None:
        """Nothing of any request is left."""
        await wait_until(lambda: self.server.statistics().num_running == 0)
        await wait_until(lambda: self.server.num_requests == 0)


@contextlib.asynccontextmanager
async def running_router(info: ModelInfo, *, cluster_secret: str = "", **config: Any) -> AsyncIterator[Harness]:
    """Serve until the block ends; asserts that no request is left then, and that nothing surprised the router."""
    settings = replace(RouterConfig(model=info.name, port=0, http_port=0), **config)
    server = RouterServer(settings, info, cluster_secret, MonotonicClock())
    port, http_port = await server.start()
    address = f"127.0.0.1:{port}"
    surprises = _Surprises()
    logging.getLogger("kvrelay").addHandler(surprises)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            harness = Harness(server, info, address, channel, f"http://127.0.0.1:{http_port}")
            async with harness._stack:
                yield harness
                await harness.assert_idle()
    finally:
        await server.stop(drain_timeout_s=0.1)
        logging.getLogger("kvrelay").removeHandler(surprises)
    assert not surprises.records


class _Surprises(logging.Handler):
    """Keeps what is logged as an error: there it is always a bug of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
