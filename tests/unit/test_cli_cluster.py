"""From what the router tells to what `kvrelay top` draws."""

from dataclasses import replace

from kvrelay.cli.client import (
    BlocksView,
    ClusterNodeView,
    ClusterView,
    LoadView,
    NodeStatsView,
    ProcessView,
    QuantilesView,
    RouterStatsView,
    SwapView,
)
from kvrelay.cli.cluster import look_of
from kvrelay.cli.top_view import Blocks, NodeLook, Quantiles

PROCESS = ProcessView(cpu_s=1.0, resident_bytes=1, num_fds=1, num_threads=1, uptime_s=1.0)
NOTHING = QuantilesView(count=0, p50=0.0, p90=0.0, p95=0.0, p99=0.0)
COUNTERS = (
    *("num_transfers_landed", "num_transfers_failed", "num_remote", "num_expected", "num_steps", "num_tokens"),
    *("num_sampled", "num_starts", "num_cancels", "num_errors"),
)
STATS = NodeStatsView(
    blocks=BlocksView(total=10, free=4, cached=3, owned=2, quarantined=1),
    swap=SwapView(num_host_blocks=0, num_free_host_blocks=0, num_swapped=0, num_swapped_out=0, num_swapped_in=0),
    process=PROCESS,
    transfer_states={"granted": 2, "landing": 1},
    transport_bytes={"zmq": 5, "shm": 7, "tcp": 0},
    transport_landed={},
    num_transfer_bytes=12,
    num_preemptions=6,
    num_prefix_queries=100,
    num_prefix_hits=25,
    is_healthy=True,
    **dict.fromkeys(COUNTERS, 99),
)
NODE = ClusterNodeView(
    role="decode",
    epoch="e",
    name="d",
    address="",
    draining=True,
    version="",
    quantization="",
    device="cpu",
    kernels="",
    num_blocks=10,
    max_num_seqs=4,
    max_model_len=128,
    sessions=(),
    load=LoadView(
        num_free_blocks=7, num_running=1, num_waiting=2, num_waiting_tokens=3, num_wanted_blocks=4, tokens_per_s=5.5
    ),
    stats=STATS,
    stats_age_s=0.25,
)
CLUSTER = ClusterView(
    model="m",
    num_requests=3,
    router=RouterStatsView(
        num_running=1,
        num_waiting=2,
        num_refused=3,
        num_finished=4,
        num_failed=5,
        num_left=6,
        num_prompt_tokens=7,
        num_cached_tokens=8,
        num_output_tokens=9,
        num_kv_bytes=10,
        window_s=30.0,
        tokens_per_s=11.5,
        ttft_ms=QuantilesView(count=2, p50=1.0, p90=2.0, p95=2.5, p99=3.0),
        itl_ms=NOTHING,
        process=PROCESS,
    ),
    nodes=(NODE, replace(NODE, stats=None)),
)


def test_a_look_has_the_router_s_numbers_and_its_nodes_reports() -> None:
    look = look_of(CLUSTER, 42.0)
    assert (look.at_s, look.model, look.tokens_per_s) == (42.0, "m", 11.5)
    assert (look.num_running, look.num_waiting, look.num_refused, look.num_finished, look.num_failed) == (1, 2, 3, 4, 5)
    assert (look.ttft_ms, look.itl_ms) == (Quantiles(1.0, 2.0, 3.0), None)
    said = {"role": "decode", "epoch": "e", "name": "d", "is_draining": True}
    silent = NodeLook(num_running=1, num_waiting=2, tokens_per_s=5.5, **said)
    reported = replace(
        silent,
        age_s=0.25,
        blocks=Blocks(total=10, free=4, cached=3, held=2, quarantined=1),
        num_transfers=3,
        num_transferred_bytes=12,
        num_preemptions=6,
        num_prefix_queries=100,
        num_prefix_hits=25,
        transports=("shm", "zmq"),
    )
    assert look.nodes == (reported, silent)
