"""Protobuf to a node's own types and back. Generated classes travel no further in than this file and the link."""

from collections.abc import Iterator

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    CacheChange,
    Delta,
    HandoffReport,
    Leg,
    LegReport,
    Load,
    Peer,
    TraceContext,
)
from kvrelay.engine.metrics import HistogramSnapshot, ProcessStatistics
from kvrelay.engine.request import (
    Logprobs,
    Request,
    RequestKey,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from kvrelay.node.report import Snapshot, Start
from kvrelay.proto import inference_pb2, node_pb2

ROLES = {"prefill": node_pb2.ROLE_PREFILL, "decode": node_pb2.ROLE_DECODE}

_LEGS = {
    node_pb2.Start.LEG_PREFILL: Leg.PREFILL,
    node_pb2.Start.LEG_DECODE: Leg.DECODE,
    node_pb2.Start.LEG_WHOLE: Leg.WHOLE,
}

_MAX_STEP_BYTES = 2**20  # a quarter of the least that any end of a stream takes
_MAX_NAMES = 2**14  # of blocks in one message: 128 KiB
_MAX_INT64 = 2**63 - 1
_COUNTS = (
    ("max_tokens", 1, _MAX_INT64),
    ("min_tokens", 0, _MAX_INT64),
    ("top_k", 0, _MAX_INT64),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
)


def read_start(message: node_pb2.Start, now: float, vocab_size: int) -> Start:
    """A router's Start on this node's clock.

    Raises: InvalidArgument; a router has validated all this, but a node trusts no peer with its memory.
    """
    if message.leg not in _LEGS:
        raise InvalidArgument("leg", message.leg, "unknown")
    if not message.prompt_token_ids:
        raise InvalidArgument("prompt_token_ids", [], "must not be empty")
    bad_word_ids = tuple(tuple(word.ids) for word in message.bad_word_ids)
    if () in bad_word_ids:
        raise InvalidArgument("bad_word_ids", [], "must not be empty")
    named = {
        "prompt_token_ids": message.prompt_token_ids,
        "output_token_ids": message.output_token_ids,
        "logit_bias": message.sampling.logit_bias,
        "bad_word_ids": (token_id for word in bad_word_ids for token_id in word),
    }
    for field, ids in named.items():
        wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise InvalidArgument(field, wrong, f"token ids must be in [0, {vocab_size})")
    sampling = read_sampling(message.sampling, bad_word_ids)
    if message.output_token_ids and sampling.n > 1:
        raise InvalidArgument("n", sampling.n, "one choice is resumed at a time")
    request = Request(
        key=RequestKey(message.request_id, message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        choice=message.choice,
        sampling=sampling,
        priority=message.priority,
        arrival=now,
        deadline=now + message.timeout_s,
        cache_salt=message.cache_salt,
    )
    trace = TraceContext(message.trace.traceparent, message.trace.tracestate) if message.HasField("trace") else None
    return Start(_LEGS[message.leg], request, message.peer_epoch, trace=trace)


def read_sampling(
    message: inference_pb2.SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...] = ()
) -> SamplingParams:
    """Sampling parameters as a router sends them: the fields that a node does not act on stay at their defaults.

    Raises: InvalidArgument for a count that would upset a whole step.
    """
    for name, least, most in _COUNTS:
        if not least <= getattr(message, name) <= most:
            raise InvalidArgument(name, getattr(message, name), f"must be in [{least}, {most}]")
    if not message.repetition_penalty > 0:
        raise InvalidArgument("repetition_penalty", message.repetition_penalty, "must be above 0")
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        bad_word_ids=bad_word_ids,
        n=message.n,
        structured_output=_read_structured_output(message) if message.HasField("structured_output") else None,
    )


def _read_structured_output(message: inference_pb2.SamplingParams) -> StructuredOutput:
    """Raises: InvalidArgument. What the form says is looked at where it is compiled."""
    asked = message.structured_output
    if (kind := asked.WhichOneof("form")) is None:
        raise InvalidArgument("structured_output", None, "unknown")
    text = asked.json_schema or asked.regex or asked.grammar  # those that are not set are empty
    return StructuredOutput(kind=StructuredKind(kind), specification=text, choices=tuple(asked.choice.choices))


def read_peers(message: node_pb2.Peers) -> tuple[Peer, ...]:
    return tuple(Peer(peer.epoch, peer.connector_address) for peer in message.decode_nodes)


def write_step(
    deltas: tuple[Delta, ...], snapshot: Snapshot, change: CacheChange | None
) -> Iterator[node_pb2.NodeMessage]:
    """All that one step brought: in one message, or in several where it is large."""
    message = node_pb2.NodeMessage(step=node_pb2.Step(load=write_load(snapshot.load)))
    num_bytes = 0
    for delta in map(_write_delta, deltas):
        num_bytes += delta.ByteSize()
        if num_bytes > _MAX_STEP_BYTES and message.step.deltas:
            yield message
            message, num_bytes = node_pb2.NodeMessage(step=node_pb2.Step()), delta.ByteSize()
        message.step.deltas.append(delta)
    for piece in _write_change(change) if change else ():
        if message.step.HasField("cache"):
            yield message
            message = node_pb2.NodeMessage(step=node_pb2.Step())
        message.step.cache.CopyFrom(piece)
    yield message


def write_load(load: Load) -> node_pb2.Load:
    return node_pb2.Load(
        num_free_blocks=load.num_free_blocks,
        num_wanted_blocks=load.num_wanted_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        tokens_per_s=load.tokens_per_s,
        sessions=sorted(load.sessions),
    )


def write_layout(layout: KVLayout) -> node_pb2.KVLayout:
    return node_pb2.KVLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def write_stats(role: str, epoch: str, name: str, snapshot: Snapshot, process: ProcessStatistics) -> node_pb2.NodeStats:
    blocks, transfers, swap = snapshot.blocks, snapshot.transfers, snapshot.swap
    return node_pb2.NodeStats(
        role=ROLES[role],
        epoch=epoch,
        name=name,
        blocks=node_pb2.BlockStats(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            owned=blocks.owned,
            quarantined=blocks.quarantined,
        ),
        transfers=node_pb2.TransferStats(
            states=transfers.states,
            num_landed=transfers.num_landed,
            num_failed=transfers.num_failed,
            num_bytes=transfers.num_bytes,
            sessions=transfers.sessions,
            transports={
                name: node_pb2.TransportStats(num_landed=traffic.num_landed, num_bytes=traffic.num_bytes)
                for name, traffic in transfers.transports.items()
            },
            num_dropped=transfers.num_dropped,
        ),
        load=write_load(snapshot.load),
        num_steps=snapshot.num_steps,
        num_preemptions=snapshot.num_preemptions,
        num_prefix_queries=snapshot.num_prefix_queries,
        num_prefix_hits=snapshot.num_prefix_hits,
        swap=node_pb2.SwapStats(
            num_host_blocks=swap.num_host_blocks,
            num_free_host_blocks=swap.num_free_host_blocks,
            num_swapped=swap.num_swapped,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
        ),
        num_tokens=snapshot.num_tokens,
        num_sampled=snapshot.num_sampled,
        step_seconds=_write_histogram(snapshot.step_seconds),
        batch_sizes=_write_histogram(snapshot.batch_sizes),
        num_starts=snapshot.num_starts,
        num_cancels=snapshot.num_cancels,
        num_errors=snapshot.num_errors,
        num_remote=snapshot.num_remote,
        num_expected=snapshot.num_expected,
        is_healthy=snapshot.is_healthy,
        process=node_pb2.ProcessStats(
            cpu_s=process.cpu_s,
            resident_bytes=process.resident_bytes,
            num_fds=process.num_fds,
            num_threads=process.num_threads,
            uptime_s=process.uptime_s,
        ),
    )


def _write_histogram(histogram: HistogramSnapshot) -> node_pb2.Histogram:
    return node_pb2.Histogram(counts=histogram.counts, sum=histogram.sum)


def _write_change(change: CacheChange) -> Iterator[node_pb2.CacheChange]:
    """In one piece at least. What is evicted goes first: so a router never counts more blocks than there are."""
    evicted, stored = tuple(change.evicted), tuple(change.stored)
    for start in range(0, max(1, len(evicted) + len(stored)), _MAX_NAMES):
        end = start + _MAX_NAMES
        yield node_pb2.CacheChange(
            from_nothing=change.from_nothing and start == 0,
            evicted=evicted[start:end],
            stored=stored[max(0, start - len(evicted)) : max(0, end - len(evicted))],
        )


def _write_delta(delta: Delta) -> node_pb2.Delta:
    message = node_pb2.Delta(
        request_id=delta.key.request_id,
        attempt=delta.key.attempt,
        choice=delta.choice,
        first_token_index=delta.first_token_index,
        token_ids=delta.token_ids,
        logprobs=map(_write_logprobs, delta.logprobs),
        finish_reason=delta.finish_reason or "",
        ended=delta.ended,
        prompt_logprobs=map(_write_logprobs, delta.prompt_logprobs),
        first_prompt_index=delta.first_prompt_index,
    )
    if delta.error is not None:
        error = delta.error
        message.error.CopyFrom(node_pb2.Error(code=error.code, message=error.message, retryable=error.retryable))
    if delta.report is not None:
        message.report.CopyFrom(_write_leg_report(delta.report))
    return message


def _write_logprobs(logprobs: Logprobs) -> inference_pb2.Logprobs:
    return inference_pb2.Logprobs(token_ids=logprobs.token_ids, logprobs=logprobs.logprobs)


def _write_leg_report(report: LegReport) -> node_pb2.LegReport:
    message = node_pb2.LegReport(
        queue_ms=report.queue_ms,
        compute_ms=report.compute_ms,
        num_cached_tokens=report.num_cached_tokens,
    )
    if report.handoff is not None:
        message.handoff.CopyFrom(_write_handoff(report.handoff))
    return message


def _write_handoff(handoff: HandoffReport) -> inference_pb2.HandoffReport:
    return inference_pb2.HandoffReport(
        kv_bytes=handoff.kv_bytes,
        kv_blocks=handoff.kv_blocks,
        cached_blocks=handoff.cached_blocks,
        grant_ms=handoff.grant_ms,
        transfer_ms=handoff.transfer_ms,
        transport=handoff.transport,
    )
