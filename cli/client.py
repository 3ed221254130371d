"""A client of the router's gRPC: the one place here that knows the generated classes."""

import os
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
API_KEY = "KVRELAY_API_KEY"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantilesView:
    """Of the values of late, in milliseconds; zeros where there were none."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """What a process uses."""

    cpu_s: float
    resident_bytes: int
    num_fds: int
    num_threads: int
    uptime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """KV blocks by what they are."""

    total: int
    free: int
    cached: int
    owned: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapView:
    """Host memory for the KV of preempted requests."""

    num_host_blocks: int
    num_free_host_blocks: int
    num_swapped: int
    num_swapped_out: int
    num_swapped_in: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """How busy a node is, by its last word."""

    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_wanted_blocks: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatsView:
    """A node's report of once a second. Counters are since its start."""

    blocks: BlocksView
    swap: SwapView
    process: ProcessView
    transfer_states: Mapping[str, int]  # transfers that last, by state
    transport_bytes: Mapping[str, int]  # sent by a prefill node, received by a decode node
    transport_landed: Mapping[str, int]
    num_transfers_landed: int
    num_transfers_failed: int
    num_transfer_bytes: int
    num_remote: int
    num_expected: int
    num_steps: int
    num_tokens: int
    num_sampled: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_starts: int
    num_cancels: int
    num_errors: int
    is_healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNodeView:
    """A node of the cluster and how it does."""

    role: str
    epoch: str
    name: str
    address: str
    draining: bool
    version: str
    quantization: str
    device: str
    kernels: str
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    sessions: tuple[str, ...]
    load: LoadView
    stats: NodeStatsView | None  # before the first report
    stats_age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatsView:
    """The router's own numbers. Counters are since its start; what is of late, over `window_s`."""

    num_running: int
    num_waiting: int
    num_refused: int
    num_finished: int
    num_failed: int
    num_left: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_kv_bytes: int
    window_s: float
    tokens_per_s: float
    ttft_ms: QuantilesView
    itl_ms: QuantilesView
    process: ProcessView


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The cluster, as its router sees it."""

    model: str
    num_requests: int
    router: RouterStatsView
    nodes: tuple[ClusterNodeView, ...]


class RouterClient:
    """One connection to one router. Every method raises KvrelayError: RemoteError, or Unavailable without a router.

    Calls bear the API key that KVRELAY_API_KEY has, the first where it has several.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        key = own_api_key()
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
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
            async for response in self._inference.Generate(request, timeout=deadline_s, metadata=self._metadata):
                yield _read_piece(response)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error

    async def model(self, *, timeout_s: float) -> ModelView:
        """What is served."""
        try:
            told = await self._inference.GetModel(
                inference_pb2.GetModelRequest(), timeout=timeout_s, metadata=self._metadata
            )
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
            told = await self._inference.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return tuple(told.token_ids)

    async def nodes(self, *, timeout_s: float) -> tuple[NodeView, ...]:
        """Who is registered now."""
        state = await self._get_cluster(timeout_s)
        return tuple(
            NodeView(
                role=_read_role(node.role),
                epoch=node.epoch,
                name=node.name,
                address=node.grpc_address,
                sessions=tuple(node.load.sessions),
            )
            for node in state.nodes
        )

    async def cluster(self, *, timeout_s: float) -> ClusterView:
        """Everything that the router tells of itself and of the nodes, once a second new."""
        state = await self._get_cluster(timeout_s)
        return ClusterView(
            model=state.model,
            num_requests=state.num_requests,
            router=_read(
                RouterStatsView,
                state.router,
                ttft_ms=_read(QuantilesView, state.router.ttft_ms),
                itl_ms=_read(QuantilesView, state.router.itl_ms),
                process=_read(ProcessView, state.router.process),
            ),
            nodes=tuple(map(_read_node, state.nodes)),
        )

    async def _get_cluster(self, timeout_s: float) -> node_pb2.ClusterState:
        try:
            state: node_pb2.ClusterState = await self._cluster.GetCluster(
                node_pb2.GetClusterRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return state

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


def own_api_key() -> str:
    """The key that a client here bears, or nothing; of several the first."""
    return os.environ.get(API_KEY, "").partition(",")[0].strip()


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


def _read_role(role: node_pb2.Role) -> str:
    return node_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def _read_node(message: node_pb2.ClusterNode) -> ClusterNodeView:
    return _read(
        ClusterNodeView,
        message,
        role=_read_role(message.role),
        address=message.grpc_address,
        sessions=tuple(message.load.sessions),
        load=_read(LoadView, message.load),
        stats=_read_stats(message.stats) if message.HasField("stats") else None,
    )


def _read_stats(message: node_pb2.NodeStats) -> NodeStatsView:
    transfers = message.transfers
    return _read(
        NodeStatsView,
        message,
        blocks=_read(BlocksView, message.blocks),
        swap=_read(SwapView, message.swap),
        process=_read(ProcessView, message.process),
        transfer_states=dict(transfers.states),
        transport_bytes={name: traffic.num_bytes for name, traffic in transfers.transports.items()},
        transport_landed={name: traffic.num_landed for name, traffic in transfers.transports.items()},
        num_transfers_landed=transfers.num_landed,
        num_transfers_failed=transfers.num_failed,
        num_transfer_bytes=transfers.num_bytes,
    )


View = TypeVar("View")


def _read(kind: type[View], message: object, **others: Any) -> View:
    """A message as the dataclass that has its field names, but for `others`, which are read already."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: others[name] if name in others else getattr(message, name) for name in names})
