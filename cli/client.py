"""A client of the router's gRPC: the one place here that knows the generated classes."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.engine.errors import KvrelayError, RemoteError, Unavailable
from kvrelay.engine.request import Logprobs
from kvrelay.proto import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc

_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_DEADLINE_MARGIN_S = 1.0  # the router's own answer that a request is late should come first
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_reconnect_backoff_ms", 2000),  # who waits for a router to come back sees it soon
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time to the first and to the second token went; docs/architecture.md explains the segments."""

    ttft_ms: float
    route_ms: float
    prefill_queue_ms: float
    prefill_ms: float
    first_token_out_ms: float
    second_token_ms: float
    exposed_transfer_ms: float
    decode_queue_ms: float
    first_decode_step_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What one answer's hand-off moved."""

    kv_bytes: int
    kv_blocks: int
    cached_blocks: int
    grant_ms: float
    transfer_ms: float
    transport: str
    prefill_node: str
    decode_node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The next part of one choice of an answer. A choice's last has a finish reason; the answer's last says what
    the whole took. Log-probabilities of the prompt, where asked for, come before the first token."""

    choice: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What is served, as the router tells it."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node, as the router sees it."""

    role: str  # "prefill" or "decode"
    epoch: str
    name: str
    address: str
    sessions: tuple[str, ...]  # epochs of the decode nodes that a prefill node can push to


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation, for the model's chat template."""

    role: str  # "system", "user" or "assistant", or what else the template knows
    content: str


class RouterClient:
    """One connection to one router. Every method raises KvrelayError: RemoteError, or Unavailable without a router."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = node_pb2_grpc.ClusterStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(grace=None)

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        *,
        raw: bool = False,
        model: str = "",
        sampling: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Stream one answer to a user's message, to a raw text, to token ids, or to a whole conversation.

        `sampling` by SamplingParams' field names; a field that is absent has its default.
        """
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=inference_pb2.SamplingParams(**(sampling or {})),
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        if isinstance(prompt, str) and raw:
            request.text = prompt
        elif isinstance(prompt, str):
            request.chat.messages.add(role="user", content=prompt)
        else:
            for part in prompt:
                if isinstance(part, ChatMessage):
                    request.chat.messages.add(role=part.role, content=part.content)
                else:
                    request.token_ids.ids.append(part)
        deadline_s = None if timeout_s is None else timeout_s + _DEADLINE_MARGIN_S
        try:
            async for response in self._inference.Generate(request, timeout=deadline_s):
                yield _read_piece(response)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def model(self, *, timeout_s: float) -> ModelView:
        """What is served."""
        try:
            told = await self._inference.GetModel(inference_pb2.GetModelRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return ModelView(
            model=told.model,
            architecture=told.architecture,
            vocab_size=told.vocab_size,
            max_model_len=told.max_model_len,
            eos_token_ids=tuple(told.eos_token_ids),
            bos_token_id=told.bos_token_id if told.HasField("bos_token_id") else None,
        )

    async def tokenize(self, prompt: str | Sequence[ChatMessage], *, timeout_s: float) -> tuple[int, ...]:
        """The tokens of a text as it is, or of a conversation in the model's chat template."""
        request = inference_pb2.TokenizeRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            for message in prompt:
                request.chat.messages.add(role=message.role, content=message.content)
        try:
            told = await self._inference.Tokenize(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return tuple(told.token_ids)

    async def nodes(self, *, timeout_s: float) -> tuple[NodeView, ...]:
        """Who is registered now."""
        try:
            state = await self._cluster.GetCluster(node_pb2.GetClusterRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return tuple(
            NodeView(
                role=node_pb2.Role.Name(node.role).removeprefix("ROLE_").lower(),
                epoch=node.epoch,
                name=node.name,
                address=node.grpc_address,
                sessions=tuple(node.load.sessions),
            )
            for node in state.nodes
        )

    async def is_serving(self, *, timeout_s: float) -> bool:
        """What the standard health service says; every role answers it, not the router alone."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _translate(self, error: grpc.aio.AioRpcError) -> KvrelayError:
        said = " ".join((error.details() or "").split())
        if error.code() is grpc.StatusCode.UNAVAILABLE and said.startswith("failed to connect"):
            return Unavailable(f"nobody answers at {self.address}: {said}")
        return RemoteError(error.code().name, said or error.code().name, error.code() in _RETRYABLE)


def _read_piece(message: inference_pb2.GenerateResponse) -> Piece:
    return Piece(
        choice=message.choice,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(_read_logprobs, message.logprobs)),
        prompt_logprobs=tuple(map(_read_logprobs, message.prompt_logprobs)),
        finish_reason=message.finish_reason,
        usage=_read(Usage, message.usage) if message.HasField("usage") else None,
        timings=_read(Timings, message.timings) if message.HasField("timings") else None,
        handoff=_read(Handoff, message.handoff) if message.HasField("handoff") else None,
    )


def _read_logprobs(message: inference_pb2.Logprobs) -> Logprobs:
    return Logprobs(tuple(message.token_ids), tuple(message.logprobs))


View = TypeVar("View", Usage, Timings, Handoff)


def _read(kind: type[View], message: object) -> View:
    """A message as the dataclass that has its field names."""
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})
