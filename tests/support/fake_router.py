"""A router's gRPC without nodes behind it: echoes each prompt word by word, and keeps what it was asked.

Several choices echo in turn; every token is as likely as the next. A prompt of token ids is answered with as many
tokens as it asks for, `tokens_per_message` at a time.
"""

import contextlib
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.proto import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc

# A prompt that begins so ends with the gRPC status that follows.
FAIL = "fail "


class FakeRouter(inference_pb2_grpc.InferenceServicer, node_pb2_grpc.ClusterServicer):
    """Serves on `address` while `serving` is entered."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.health = health.aio.HealthServicer()
        self.nodes: list[node_pb2.ClusterNode] = []
        self.model = inference_pb2.GetModelResponse(
            model="fake", architecture="FakeForCausalLM", vocab_size=100, max_model_len=128, eos_token_ids=[2, 5]
        )
        self.tokens_per_message = 1
        self.failures: dict[int, str] = {}  # gRPC status of the n-th prompt of token ids, from 0

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        if request.HasField("token_ids"):
            async for response in self._count(request, context):
                yield response
            return
        prompt = request.text or request.chat.messages[0].content
        if prompt.startswith(FAIL):
            await context.abort(grpc.StatusCode[prompt.removeprefix(FAIL)], "as asked")
        sampling, words = request.sampling, prompt.split()
        if sampling.HasField("prompt_logprobs"):
            known = [inference_pb2.Logprobs(), inference_pb2.Logprobs(token_ids=[3], logprobs=[-0.5])]
            yield inference_pb2.GenerateResponse(prompt_logprobs=known)
        for index, word in enumerate(words):
            for choice in range(sampling.n or 1):
                yield inference_pb2.GenerateResponse(
                    choice=choice,
                    text=f"{word} ",
                    token_ids=[index],
                    first_token_index=index,
                    logprobs=[inference_pb2.Logprobs(token_ids=[index, 9], logprobs=[-1.5, -0.25])]
                    if sampling.HasField("logprobs")
                    else [],
                )
        for choice in range(1, sampling.n):
            yield inference_pb2.GenerateResponse(choice=choice, text=f"end {choice}", finish_reason="length")
        yield inference_pb2.GenerateResponse(
            text="end",
            finish_reason="stop",
            usage=inference_pb2.Usage(prompt_tokens=7, completion_tokens=index + 1, cached_tokens=2),
            timings=inference_pb2.Timings(ttft_ms=30, route_ms=1, prefill_ms=29, second_token_ms=40, total_ms=130),
            handoff=inference_pb2.HandoffReport(kv_bytes=368640, kv_blocks=1, transport="zmq", prefill_node="p"),
        )

    async def _count(self, request, context):
        """Answer a prompt of token ids."""
        number = sum(earlier.HasField("token_ids") for earlier in self.requests) - 1
        if number in self.failures:
            await context.abort(grpc.StatusCode[self.failures[number]], "as asked")
        num_prompt_tokens, num_tokens = len(request.token_ids.ids), request.sampling.max_tokens
        for start in range(0, num_tokens, self.tokens_per_message):
            token_ids = range(start, min(start + self.tokens_per_message, num_tokens))
            yield inference_pb2.GenerateResponse(token_ids=token_ids, first_token_index=start)
        yield inference_pb2.GenerateResponse(
            finish_reason="length",
            usage=inference_pb2.Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens, cached_tokens=3),
            timings=inference_pb2.Timings(ttft_ms=30, prefill_ms=29, exposed_transfer_ms=1.5, total_ms=130),
            handoff=inference_pb2.HandoffReport(kv_bytes=368640, kv_blocks=1, transfer_ms=7, transport="zmq"),
        )

    async def GetModel(self, request, context):  # noqa: N802
        return self.model

    async def Tokenize(self, request, context):  # noqa: N802
        """A token a word: as long as the word."""
        return inference_pb2.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])

    async def GetCluster(self, request, context):  # noqa: N802
        return node_pb2.ClusterState(model="fake", nodes=self.nodes)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[FakeRouter]:
    """A fake router on a free port of the loopback."""
    server, router = grpc.aio.server(), FakeRouter()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    node_pb2_grpc.add_ClusterServicer_to_server(router, server)
    health_pb2_grpc.add_HealthServicer_to_server(router.health, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await router.health.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        yield router
    finally:
        await server.stop(grace=None)
