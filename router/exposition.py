"""What a router and its nodes count, as Prometheus reads it: one page for the whole cluster.

Nodes report to the router once a second, and their numbers stand here with `node`, `role` and `epoch` labels, so that
one scrape sees all. An epoch is one life of a node: a restarted one counts from zero under a new label, and one that is
gone leaves. Reads frozen statistics, and nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay import __version__
from kvrelay.engine.metrics import HistogramSnapshot, ProcessStatistics
from kvrelay.router.cluster_wire import RouterView
from kvrelay.router.metrics import RequestStatistics
from kvrelay.router.node_statistics import NodeStatistics
from kvrelay.router.registry import Node

_NODE = ("node", "role", "epoch")

Labels = tuple[str, ...]
Value = Callable[[NodeStatistics], float]


def render(router: RouterView, nodes: Iterable[Node], now: float) -> bytes:
    """The page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page([*_of_router(router), *_of_requests(router.requests), *_of_nodes(list(nodes), now)]))
    page: bytes = generate_latest(registry)
    return page


class _Page(Collector):
    """Families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


# --- the router


def _of_router(router: RouterView) -> Iterator[Metric]:
    build = GaugeMetricFamily("kvrelay_build_info", "What runs: always 1.", labels=("version", "model"))
    build.add_metric((__version__, router.model), 1)
    yield build
    running = max(0, router.num_requests - router.num_waiting)
    yield _gauge(
        "kvrelay_requests",
        "Requests on this router now: waiting for their first token, or running.",
        "state",
        {"waiting": router.num_waiting, "running": running},
    )
    yield _counter("kvrelay_requests_refused", "Calls that found no room.", router.num_refused)
    yield _counter(
        "kvrelay_late_deltas", "Words of nodes that came after their request's end.", router.dispatch.num_late_deltas
    )
    yield from _of_process("kvrelay_router", (), {(): router.process})


def _of_requests(requests: RequestStatistics) -> Iterator[Metric]:
    yield _counter("kvrelay_requests_started", "Requests that were placed on nodes.", requests.num_started)
    yield _counter("kvrelay_requests_whole", "Of these, on one node that does both legs.", requests.num_whole)
    ended = CounterMetricFamily(
        "kvrelay_requests_ended", "Requests by how they ended; left: cancelled, or out of time.", labels=("outcome",)
    )
    for outcome, count in requests.outcomes.items():
        ended.add_metric((outcome,), count)
    yield ended
    yield _counter("kvrelay_prompt_tokens", "Tokens of prompts that were placed.", requests.num_prompt_tokens)
    yield _counter("kvrelay_output_tokens", "Tokens that went to clients.", requests.num_output_tokens)
    yield _counter(
        "kvrelay_prompt_cached_tokens",
        "Tokens of finished requests' prompts that the first leg's prefix cache held.",
        requests.num_cached_tokens,
    )
    yield _counter(
        "kvrelay_handoff_blocks", "KV blocks that finished requests' hand-offs moved.", requests.num_kv_blocks
    )
    yield _counter(
        "kvrelay_handoff_cached_blocks",
        "KV blocks that did not travel, since the decode node had them.",
        requests.num_kv_blocks_cached,
    )
    seconds = (
        ("kvrelay_time_to_first_token", "From a request's arrival to its first token's going out.", "ttft_seconds"),
        ("kvrelay_inter_token_latency", "Each gap between two outputs of a choice.", "itl_seconds"),
        ("kvrelay_time_per_output_token", "A choice's time after its first token, a token.", "tpot_seconds"),
        ("kvrelay_request", "From a request's arrival to its end.", "request_seconds"),
    )
    for name, text, field in seconds:
        yield _histogram(f"{name}_seconds", text, (), {(): getattr(requests, field)})
    yield _histogram(
        "kvrelay_request_segment_seconds",
        "Where the time to the second token goes (docs/architecture.md).",
        ("segment",),
        {(name,): snapshot for name, snapshot in requests.segment_seconds.items()},
    )
    yield _histogram("kvrelay_request_prompt_tokens", "Lengths of prompts.", (), {(): requests.prompt_tokens})
    yield _histogram("kvrelay_request_output_tokens", "Lengths of outputs.", (), {(): requests.output_tokens})
    transfers = requests.transfers.items()
    yield _histogram(
        "kvrelay_handoff_seconds",
        "Hand-offs of finished requests, from their grant to their KV's having landed.",
        ("transport",),
        {(transport,): of.seconds for transport, of in transfers},
    )
    yield _histogram(
        "kvrelay_handoff_bytes",
        "What these hand-offs moved.",
        ("transport",),
        {(transport,): of.size_bytes for transport, of in transfers},
    )


# --- nodes

_GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("kvrelay_node_healthy", "Whether the node says that it can serve.", lambda node: node.is_healthy),
    ("kvrelay_node_awaited_kv", "Choices that have a grant, their KV on its way.", lambda node: node.num_remote),
    (
        "kvrelay_node_expected",
        "Choices that were called for, and not offered yet by a prefill node.",
        lambda node: node.num_expected,
    ),
    ("kvrelay_node_swapped", "Preempted requests whose KV lies in host memory.", lambda node: node.swap.num_swapped),
)
_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("kvrelay_node_steps", "Scheduler steps.", lambda node: node.num_steps),
    ("kvrelay_node_computed_tokens", "Tokens computed, of prompts and of outputs.", lambda node: node.num_tokens),
    ("kvrelay_node_sampled_tokens", "Tokens sampled.", lambda node: node.num_sampled),
    ("kvrelay_node_legs_started", "Legs of requests that were asked for.", lambda node: node.num_starts),
    ("kvrelay_node_legs_cancelled", "Legs or choices that were cancelled.", lambda node: node.num_cancels),
    ("kvrelay_node_legs_failed", "Legs that an error ended.", lambda node: node.num_errors),
    (
        "kvrelay_node_prefix_cache_queried_tokens",
        "Tokens looked up in the prefix cache.",
        lambda node: node.num_prefix_queries,
    ),
    ("kvrelay_node_prefix_cache_hit_tokens", "Tokens found in it.", lambda node: node.num_prefix_hits),
    ("kvrelay_node_transfers_failed", "Transfers that did not.", lambda node: node.transfers.num_failed),
    (
        "kvrelay_node_transfer_messages_dropped",
        "Messages and pieces that were malformed, late or not meant.",
        lambda node: node.transfers.num_dropped,
    ),
)


def _of_nodes(nodes: list[Node], now: float) -> Iterator[Metric]:
    labels = {node.facts.epoch: (node.facts.name, node.facts.role.value, node.facts.epoch) for node in nodes}
    info = GaugeMetricFamily(
        "kvrelay_node_info", "What a node is: always 1.", labels=(*_NODE, "device", "kernels", "quantization")
    )
    age = GaugeMetricFamily("kvrelay_node_report_age_seconds", "Time since the node's last report.", labels=_NODE)
    draining = GaugeMetricFamily("kvrelay_node_draining", "Whether the node takes nothing new.", labels=_NODE)
    for node in nodes:
        facts = node.facts
        info.add_metric((*labels[facts.epoch], facts.device, facts.kernels, facts.quantization), 1)
        draining.add_metric(labels[facts.epoch], node.draining)
        if node.statistics is not None:
            age.add_metric(labels[facts.epoch], max(0.0, now - node.reported_at))
    yield from (info, age, draining)
    yield from _of_loads({labels[node.facts.epoch]: node for node in nodes})
    known: dict[Labels, NodeStatistics] = {
        labels[node.facts.epoch]: node.statistics for node in nodes if node.statistics is not None
    }
    yield from _of_reports(known)


def _of_loads(nodes: Mapping[Labels, Node]) -> Iterator[Metric]:
    queue = GaugeMetricFamily(
        "kvrelay_node_requests", "Requests on a node: waiting for a place, or holding one.", labels=(*_NODE, "state")
    )
    tokens = GaugeMetricFamily("kvrelay_node_waiting_tokens", "Tokens that are still to be computed.", labels=_NODE)
    rate = GaugeMetricFamily(
        "kvrelay_node_tokens_per_second", "How fast the node computed of late, pauses left out.", labels=_NODE
    )
    for labels, node in nodes.items():
        queue.add_metric((*labels, "waiting"), node.load.num_waiting)
        queue.add_metric((*labels, "running"), node.load.num_running)
        tokens.add_metric(labels, node.load.num_waiting_tokens)
        rate.add_metric(labels, node.load.tokens_per_s)
    yield from (queue, tokens, rate)


def _of_reports(reports: Mapping[Labels, NodeStatistics]) -> Iterator[Metric]:
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_NODE)
        for labels, report in reports.items():
            gauge.add_metric(labels, float(value(report)))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_NODE)
        for labels, report in reports.items():
            counter.add_metric(labels, value(report))
        yield counter
    blocks = GaugeMetricFamily("kvrelay_kv_blocks", "KV blocks by what they are.", labels=(*_NODE, "state"))
    preemptions = CounterMetricFamily(
        "kvrelay_preemptions", "Requests that gave way, by what became of their KV.", labels=(*_NODE, "kind")
    )
    for labels, report in reports.items():
        for state in ("free", "cached", "held", "quarantined"):
            blocks.add_metric((*labels, state), getattr(report.blocks, state))
        preemptions.add_metric((*labels, "swap"), report.swap.num_swapped_out)
        preemptions.add_metric((*labels, "recompute"), report.num_recomputed)
    yield from (blocks, preemptions)
    yield from _of_transfers(reports)
    yield _histogram(
        "kvrelay_node_step_seconds", "Steps that computed.", _NODE, {k: r.step_seconds for k, r in reports.items()}
    )
    yield _histogram(
        "kvrelay_node_batch_size", "Sequences in a step.", _NODE, {k: r.batch_sizes for k, r in reports.items()}
    )
    yield from _of_process("kvrelay_node", _NODE, {labels: report.process for labels, report in reports.items()})


def _of_transfers(reports: Mapping[Labels, NodeStatistics]) -> Iterator[Metric]:
    states = GaugeMetricFamily("kvrelay_transfers", "Transfers that last, by state.", labels=(*_NODE, "state"))
    sessions = GaugeMetricFamily("kvrelay_sessions", "Open sessions between nodes.", labels=(*_NODE, "transport"))
    moved = CounterMetricFamily(
        "kvrelay_transfer_bytes", "KV moved: sent by prefill nodes, received by others.", labels=(*_NODE, "transport")
    )
    landed = CounterMetricFamily("kvrelay_transfers_landed", "Transfers that landed.", labels=(*_NODE, "transport"))
    for labels, report in reports.items():
        for state, count in report.transfers.states.items():
            states.add_metric((*labels, state), count)
        for transport, count in report.transfers.num_sessions.items():
            sessions.add_metric((*labels, transport), count)
        for transport, traffic in report.transfers.transports.items():
            moved.add_metric((*labels, transport), traffic.num_bytes)
            landed.add_metric((*labels, transport), traffic.num_landed)
    yield from (states, sessions, moved, landed)


# --- shared


def _of_process(prefix: str, names: Labels, processes: Mapping[Labels, ProcessStatistics]) -> Iterator[Metric]:
    cpu = CounterMetricFamily(f"{prefix}_cpu_seconds", "CPU time of the process.", labels=names)
    resident = GaugeMetricFamily(f"{prefix}_resident_memory_bytes", "Memory of the process.", labels=names)
    files = GaugeMetricFamily(f"{prefix}_open_fds", "Open files of the process.", labels=names)
    uptime = GaugeMetricFamily(f"{prefix}_uptime_seconds", "Time since the process began.", labels=names)
    for labels, process in processes.items():
        cpu.add_metric(labels, process.cpu_s)
        resident.add_metric(labels, process.resident_bytes)
        files.add_metric(labels, process.num_fds)
        uptime.add_metric(labels, process.uptime_s)
    yield from (cpu, resident, files, uptime)


def _counter(name: str, text: str, value: float) -> Metric:
    counter = CounterMetricFamily(name, text, labels=())
    counter.add_metric((), value)
    return counter


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        gauge.add_metric((key,), value)
    return gauge


def _histogram(name: str, text: str, names: Labels, snapshots: Mapping[Labels, HistogramSnapshot]) -> Metric:
    histogram = HistogramMetricFamily(name, text, labels=names)
    for labels, snapshot in snapshots.items():
        bounds = (*(f"{bound:.15g}" for bound in snapshot.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(snapshot.counts), strict=True))
        histogram.add_metric(labels, buckets, snapshot.sum)
    return histogram
