"""Protobuf to the router's own types and back, on the nodes' side. Generated classes travel no further in."""

from kvrelay.engine.errors import InvalidArgument, RemoteError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import CacheChange, Delta, HandoffReport, Leg, LegReport, Load
from kvrelay.engine.request import (
    FinishReason,
    Logprobs,
    RequestKey,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from kvrelay.proto import inference_pb2, node_pb2 as pb
from kvrelay.router.messages import Cancel, NodeFacts, Peers, Role, Start, ToNode

_ROLE_OF = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}
_LEGS = {
    Leg.PREFILL: pb.Start.LEG_PREFILL,
    Leg.DECODE: pb.Start.LEG_DECODE,
    Leg.WHOLE: pb.Start.LEG_WHOLE,
}
_FINISH_REASONS: dict[str, FinishReason | None] = {"": None, **{str(reason): reason for reason in FinishReason}}
_MAX_NAME = 256
_MAX_SESSIONS = 4096


# --- node -> router


def read_register(message: pb.Register) -> NodeFacts:
    """Raises: InvalidArgument."""
    if message.role not in _ROLE_OF:
        raise InvalidArgument("role", message.role, "unknown")
    for name in ("epoch", "name", "grpc_address", "connector_address", "quantization", "device", "kernels"):
        if len(getattr(message, name)) > _MAX_NAME:
            raise InvalidArgument(name, getattr(message, name), f"at most {_MAX_NAME} characters")
    for name in ("epoch", "name", "max_model_len", "num_blocks", "max_num_seqs"):
        if not getattr(message, name):
            raise InvalidArgument(name, getattr(message, name), "must be set")
    layout = message.kv_layout
    if not layout.block_size:
        raise InvalidArgument("kv_layout.block_size", layout.block_size, "must be positive")
    return NodeFacts(
        role=_ROLE_OF[message.role],
        epoch=message.epoch,
        name=message.name,
        version=message.version,
        model_fingerprint=message.model_fingerprint,
        quantization=message.quantization or "none",
        kv_layout=KVLayout(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=layout.dtype,
        ),
        max_model_len=message.max_model_len,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        grpc_address=message.grpc_address,
        connector_address=message.connector_address,
        device=message.device,
        kernels=message.kernels,
    )


def read_load(message: pb.Load) -> Load:
    """Raises: InvalidArgument."""
    if len(message.sessions) > _MAX_SESSIONS:
        raise InvalidArgument("sessions", f"{len(message.sessions)} sessions", f"at most {_MAX_SESSIONS}")
    return Load(
        num_free_blocks=message.num_free_blocks,
        num_wanted_blocks=message.num_wanted_blocks,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_waiting_tokens=message.num_waiting_tokens,
        tokens_per_s=message.tokens_per_s,
        sessions=frozenset(message.sessions),
    )


def read_cache_change(message: pb.CacheChange) -> CacheChange:
    return CacheChange(
        from_nothing=message.from_nothing,
        evicted=frozenset(message.evicted),
        stored=frozenset(message.stored),
    )


def read_delta(message: pb.Delta) -> Delta:
    """As the node said it: whether it fits the request is the race's to judge. Raises: InvalidArgument."""
    if message.finish_reason not in _FINISH_REASONS:
        raise InvalidArgument("finish_reason", message.finish_reason, "unknown")
    logprobs, prompt_logprobs = message.logprobs, message.prompt_logprobs
    return Delta(
        key=RequestKey(message.request_id, message.attempt),
        choice=message.choice,
        first_token_index=message.first_token_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(_read_logprobs, logprobs)) if logprobs else (),
        prompt_logprobs=tuple(map(_read_logprobs, prompt_logprobs)) if prompt_logprobs else (),
        first_prompt_index=message.first_prompt_index,
        finish_reason=_FINISH_REASONS[message.finish_reason],
        error=_read_error(message.error) if message.HasField("error") else None,
        report=_read_report(message.report) if message.HasField("report") else None,
        ended=message.ended,
    )


def _read_error(message: pb.Error) -> RemoteError:
    return RemoteError(message.code, message.message, message.retryable)


def _read_logprobs(message: inference_pb2.Logprobs) -> Logprobs:
    return Logprobs(tuple(message.token_ids), tuple(message.logprobs))


def _read_report(message: pb.LegReport) -> LegReport:
    return LegReport(
        queue_ms=message.queue_ms,
        compute_ms=message.compute_ms,
        num_cached_tokens=message.num_cached_tokens,
        handoff=_read_handoff(message.handoff) if message.HasField("handoff") else None,
    )


def _read_handoff(message: inference_pb2.HandoffReport) -> HandoffReport:
    return HandoffReport(
        kv_bytes=message.kv_bytes,
        kv_blocks=message.kv_blocks,
        cached_blocks=message.cached_blocks,
        grant_ms=message.grant_ms,
        transfer_ms=message.transfer_ms,
        transport=message.transport,
    )


# --- router -> node


def write_challenge(nonce: bytes, router_epoch: str) -> pb.RouterMessage:
    return pb.RouterMessage(challenge=pb.Challenge(nonce=nonce, router_epoch=router_epoch))


def write_registered(proof: bytes) -> pb.RouterMessage:
    return pb.RouterMessage(registered=pb.Registered(proof=proof))


def write_message(message: ToNode) -> pb.RouterMessage:
    """What the router's other parts say to a node."""
    match message:
        case Start():
            return pb.RouterMessage(start=_write_start(message))
        case Cancel(key, choice):
            return pb.RouterMessage(cancel=pb.Cancel(request_id=key.request_id, attempt=key.attempt, choice=choice))
        case Peers(decode_nodes):
            peers = [pb.Peer(epoch=peer.epoch, connector_address=peer.connector_address) for peer in decode_nodes]
            return pb.RouterMessage(peers=pb.Peers(decode_nodes=peers))


def _write_start(start: Start) -> pb.Start:
    request, trace = start.request, start.trace
    return pb.Start(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        leg=_LEGS[start.leg],
        peer_epoch=start.peer_epoch,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=_write_sampling(request.sampling),
        priority=request.priority,
        timeout_s=start.timeout_s,
        cache_salt=request.cache_salt,
        trace=None
        if trace is None
        else inference_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate),
        bad_word_ids=[inference_pb2.TokenIds(ids=word) for word in request.sampling.bad_word_ids],
        choice=request.choice,
    )


def _write_sampling(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    """Every field that a node acts on; text (stop strings, bad words, special tokens) is the router's own."""
    return inference_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        n=sampling.n,
        structured_output=None
        if sampling.structured_output is None
        else _write_structured_output(sampling.structured_output),
    )


def _write_structured_output(form: StructuredOutput) -> inference_pb2.StructuredOutput:
    match form.kind:
        case StructuredKind.JSON_OBJECT:
            return inference_pb2.StructuredOutput(json_object=inference_pb2.JsonObject())
        case StructuredKind.CHOICE:
            return inference_pb2.StructuredOutput(choice=inference_pb2.Choices(choices=form.choices))
        case StructuredKind.JSON_SCHEMA:
            return inference_pb2.StructuredOutput(json_schema=form.specification)
        case StructuredKind.REGEX:
            return inference_pb2.StructuredOutput(regex=form.specification)
        case StructuredKind.GRAMMAR:
            return inference_pb2.StructuredOutput(grammar=form.specification)
