"""Protobuf to a node's statistics, and the cluster to protobuf: what nodes report, and what GetCluster tells.

Generated classes travel no further in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.metrics import BATCH_SIZES, STEP_SECONDS, HistogramSnapshot, ProcessStatistics
from kvrelay.proto import node_pb2 as pb
from kvrelay.router.dispatch import DispatchStatistics
from kvrelay.router.messages import Role
from kvrelay.router.metrics import RequestStatistics
from kvrelay.router.node_statistics import (
    OTHER,
    TRANSFER_STATES,
    TRANSPORTS,
    BlockStatistics,
    NodeStatistics,
    SwapRoom,
    TrafficStatistics,
    TransferStatistics,
)
from kvrelay.router.registry import Node

_ROLES = {Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_MAX_KEYS = 64  # of a map: far more than there are names
_MAX_SESSIONS = 4096
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


# --- node -> router


def read_stats(message: pb.NodeStats) -> NodeStatistics:
    """Raises: InvalidArgument for what no node says."""
    blocks, swap = message.blocks, message.swap
    return NodeStatistics(
        blocks=BlockStatistics(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            held=blocks.owned,
            quarantined=blocks.quarantined,
        ),
        transfers=_read_transfers(message.transfers),
        swap=SwapRoom(
            num_host_blocks=swap.num_host_blocks,
            num_free_host_blocks=swap.num_free_host_blocks,
            num_swapped=swap.num_swapped,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
        ),
        num_remote=message.num_remote,
        num_expected=message.num_expected,
        num_steps=message.num_steps,
        num_tokens=message.num_tokens,
        num_sampled=message.num_sampled,
        num_preemptions=message.num_preemptions,
        num_prefix_queries=message.num_prefix_queries,
        num_prefix_hits=message.num_prefix_hits,
        num_starts=message.num_starts,
        num_cancels=message.num_cancels,
        num_errors=message.num_errors,
        is_healthy=message.is_healthy,
        step_seconds=_read_histogram("step_seconds", message.step_seconds, STEP_SECONDS),
        batch_sizes=_read_histogram("batch_sizes", message.batch_sizes, BATCH_SIZES),
        process=_read_process(message.process),
    )


def _read_transfers(message: pb.TransferStats) -> TransferStatistics:
    _check_size("transfers.states", message.states, _MAX_KEYS)
    _check_size("transfers.transports", message.transports, _MAX_KEYS)
    _check_size("transfers.sessions", message.sessions, _MAX_SESSIONS)
    states: dict[str, int] = {}
    for state, count in message.states.items():
        name = _known(state.lower(), TRANSFER_STATES)
        states[name] = states.get(name, 0) + count
    transports: dict[str, TrafficStatistics] = {}
    for transport, traffic in message.transports.items():
        name = _known(transport, TRANSPORTS)
        old = transports.get(name, TrafficStatistics())
        transports[name] = TrafficStatistics(
            num_landed=old.num_landed + traffic.num_landed, num_bytes=old.num_bytes + traffic.num_bytes
        )
    num_sessions: dict[str, int] = {}
    for transport in message.sessions.values():
        name = _known(transport, TRANSPORTS)
        num_sessions[name] = num_sessions.get(name, 0) + 1
    return TransferStatistics(
        states=states,
        transports=transports,
        num_sessions=num_sessions,
        num_landed=message.num_landed,
        num_failed=message.num_failed,
        num_bytes=message.num_bytes,
        num_dropped=message.num_dropped,
    )


def _known(name: str, names: Iterable[str]) -> str:
    return name if name in names else OTHER


def _check_size(field: str, keys: Mapping[str, object], most: int) -> None:
    if len(keys) > most:
        raise InvalidArgument(field, f"{len(keys)} entries", f"at most {most}")


def _read_histogram(field: str, message: pb.Histogram, bounds: tuple[float, ...]) -> HistogramSnapshot:
    """Unset: nothing was counted."""
    counts = tuple(message.counts) or (0,) * (len(bounds) + 1)
    if len(counts) != len(bounds) + 1:
        raise InvalidArgument(field, f"{len(counts)} buckets", f"there are {len(bounds) + 1}")
    return HistogramSnapshot(bounds, counts, _read_double(f"{field}.sum", message.sum))


def _read_process(message: pb.ProcessStats) -> ProcessStatistics:
    return ProcessStatistics(
        cpu_s=_read_double("process.cpu_s", message.cpu_s),
        resident_bytes=message.resident_bytes,
        num_fds=message.num_fds,
        num_threads=message.num_threads,
        uptime_s=_read_double("process.uptime_s", message.uptime_s),
    )


def _read_double(field: str, value: float) -> float:
    if not isfinite(value) or value < 0:
        raise InvalidArgument(field, value, "must be finite and not negative")
    return value


# --- router -> whoever asks


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """What a router says of itself."""

    model: str
    num_requests: int  # inside, of whatever kind
    num_waiting: int
    num_refused: int
    dispatch: DispatchStatistics
    requests: RequestStatistics
    process: ProcessStatistics


def write_cluster(router: RouterView, nodes: Iterable[Node], now: float) -> pb.ClusterState:
    return pb.ClusterState(
        model=router.model,
        nodes=[_write_node(node, now) for node in nodes],
        num_requests=router.num_requests,
        router=_write_router(router),
    )


def _write_router(router: RouterView) -> pb.RouterStats:
    requests, lately = router.requests, router.requests.lately
    return pb.RouterStats(
        num_running=max(0, router.num_requests - router.num_waiting),
        num_waiting=router.num_waiting,
        num_refused=router.num_refused,
        num_finished=router.dispatch.num_finished,
        num_failed=router.dispatch.num_failed,
        num_left=router.dispatch.num_left,
        num_prompt_tokens=requests.num_prompt_tokens,
        num_cached_tokens=requests.num_cached_tokens,
        num_output_tokens=requests.num_output_tokens,
        num_kv_bytes=requests.num_kv_bytes,
        window_s=lately.window_s,
        tokens_per_s=lately.tokens_per_s,
        ttft_ms=_write_quantiles(lately.ttft_seconds),
        itl_ms=_write_quantiles(lately.itl_seconds),
        process=_write_process(router.process),
    )


def _write_quantiles(seconds: HistogramSnapshot) -> pb.Quantiles:
    return pb.Quantiles(count=seconds.count, **{name: seconds.quantile(q) * 1e3 for name, q in _QUANTILES.items()})


def _write_node(node: Node, now: float) -> pb.ClusterNode:
    facts, load, statistics = node.facts, node.load, node.statistics
    return pb.ClusterNode(
        role=_ROLES[facts.role],
        epoch=facts.epoch,
        name=facts.name,
        grpc_address=facts.grpc_address,
        draining=node.draining,
        load=pb.Load(
            num_free_blocks=load.num_free_blocks,
            num_wanted_blocks=load.num_wanted_blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            tokens_per_s=load.tokens_per_s,
            sessions=sorted(load.sessions),
        ),
        stats=None if statistics is None else _write_stats(statistics),
        stats_age_s=0.0 if statistics is None else max(0.0, now - node.reported_at),
        version=facts.version,
        quantization=facts.quantization,
        device=facts.device,
        kernels=facts.kernels,
        num_blocks=facts.num_blocks,
        max_num_seqs=facts.max_num_seqs,
        max_model_len=facts.max_model_len,
    )


def _write_stats(statistics: NodeStatistics) -> pb.NodeStats:
    """As the node said it, but for names that are not known. Role, epoch, name and load stand in ClusterNode."""
    blocks, swap = statistics.blocks, statistics.swap
    return pb.NodeStats(
        blocks=pb.BlockStats(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            owned=blocks.held,
            quarantined=blocks.quarantined,
        ),
        transfers=_write_transfers(statistics.transfers),
        swap=pb.SwapStats(
            num_host_blocks=swap.num_host_blocks,
            num_free_host_blocks=swap.num_free_host_blocks,
            num_swapped=swap.num_swapped,
            num_swapped_out=swap.num_swapped_out,
            num_swapped_in=swap.num_swapped_in,
        ),
        num_remote=statistics.num_remote,
        num_expected=statistics.num_expected,
        num_steps=statistics.num_steps,
        num_tokens=statistics.num_tokens,
        num_sampled=statistics.num_sampled,
        num_preemptions=statistics.num_preemptions,
        num_prefix_queries=statistics.num_prefix_queries,
        num_prefix_hits=statistics.num_prefix_hits,
        num_starts=statistics.num_starts,
        num_cancels=statistics.num_cancels,
        num_errors=statistics.num_errors,
        is_healthy=statistics.is_healthy,
        step_seconds=_write_histogram(statistics.step_seconds),
        batch_sizes=_write_histogram(statistics.batch_sizes),
        process=_write_process(statistics.process),
    )


def _write_transfers(transfers: TransferStatistics) -> pb.TransferStats:
    return pb.TransferStats(
        states=transfers.states,
        transports={
            name: pb.TransportStats(num_landed=traffic.num_landed, num_bytes=traffic.num_bytes)
            for name, traffic in transfers.transports.items()
        },
        num_landed=transfers.num_landed,
        num_failed=transfers.num_failed,
        num_bytes=transfers.num_bytes,
        num_dropped=transfers.num_dropped,
    )


def _write_histogram(histogram: HistogramSnapshot) -> pb.Histogram:
    return pb.Histogram(counts=histogram.counts, sum=histogram.sum)


def _write_process(process: ProcessStatistics) -> pb.ProcessStats:
    return pb.ProcessStats(
        cpu_s=process.cpu_s,
        resident_bytes=process.resident_bytes,
        num_fds=process.num_fds,
        num_threads=process.num_threads,
        uptime_s=process.uptime_s,
    )
