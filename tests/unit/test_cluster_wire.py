"""What a node reports reaches whoever asks the router, and a node that reports nonsense cannot bloat it."""

from dataclasses import replace
from math import inf, nan

import pytest

from kvrelay.connector.base import ConnectorStatistics
from kvrelay.connector.handoff import R, S
from kvrelay.connector.traffic import Traffic
from kvrelay.engine.block_pool import BlockCounts
from kvrelay.engine.config import KvTransport
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.legs import Load
from kvrelay.engine.metrics import BATCH_SIZES, STEP_SECONDS, Histogram, ProcessStatistics
from kvrelay.engine.swap_space import SwapStatistics
from kvrelay.node.report import Snapshot
from kvrelay.node.wire import write_stats
from kvrelay.proto import node_pb2 as pb
from kvrelay.router.cluster_wire import _write_stats, read_stats
from kvrelay.router.node_statistics import OTHER, TRANSFER_STATES, TRANSPORTS, TrafficStatistics


def test_the_router_knows_every_transport_and_every_state_that_a_transfer_lasts_in() -> None:
    assert {"auto", *TRANSPORTS} == {"inproc", *KvTransport.__args__}
    over = {"none", "landed", "closed"}
    assert set(TRANSFER_STATES) == {state.value.lower() for state in (*S, *R)} - over


def test_what_a_node_says_comes_out_at_the_router_as_it_was() -> None:
    steps, batches = Histogram(STEP_SECONDS), Histogram(BATCH_SIZES)
    steps.observe(0.02)
    batches.observe(3)
    snapshot = Snapshot(
        blocks=BlockCounts(10, 4, 3, 2, 1),
        load=Load(num_free_blocks=7, num_running=2),
        transfers=ConnectorStatistics(
            states={"GRANTED": 2},
            sessions={"p": "zmq", "q": "tcp", "r": "tcp"},
            num_landed=3,
            num_failed=4,
            num_bytes=500,
            num_dropped=6,
            transports={"tcp": Traffic(3, 500)},
        ),
        swap=SwapStatistics(
            num_host_blocks=9, num_free_host_blocks=5, num_swapped=2, num_swapped_out=3, num_swapped_in=1
        ),
        is_healthy=False,
        num_remote=11,
        num_expected=12,
        num_steps=13,
        num_tokens=14,
        num_sampled=15,
        num_preemptions=16,
        num_prefix_queries=17,
        num_prefix_hits=18,
        num_starts=19,
        num_cancels=20,
        num_errors=21,
        step_seconds=steps.snapshot(),
        batch_sizes=batches.snapshot(),
    )
    process = ProcessStatistics(cpu_s=1.5, resident_bytes=2, num_fds=3, num_threads=4, uptime_s=5.5)
    said = write_stats("decode", "e", "d", snapshot, process)
    read = read_stats(said)
    for name in ("num_steps", "num_tokens", "num_sampled", "num_preemptions", "num_prefix_queries", "num_prefix_hits"):
        assert getattr(read, name) == getattr(snapshot, name)
    for name in ("num_remote", "num_expected", "num_starts", "num_cancels", "num_errors", "is_healthy"):
        assert getattr(read, name) == getattr(snapshot, name)
    assert (read.blocks.held, read.blocks.quarantined, read.num_recomputed) == (2, 1, 13)
    assert (read.step_seconds, read.batch_sizes, read.process) == (steps.snapshot(), batches.snapshot(), process)
    assert read.transfers.states == {"granted": 2}
    assert read.transfers.num_sessions == {"zmq": 1, "tcp": 2}
    assert read.transfers.transports == {"tcp": TrafficStatistics(num_landed=3, num_bytes=500)}
    told = read_stats(_write_stats(read))
    assert replace(told, transfers=read.transfers) == read
    assert replace(told.transfers, num_sessions=read.transfers.num_sessions) == read.transfers


@pytest.mark.parametrize(
    "said",
    [
        {"step_seconds": pb.Histogram(counts=[1])},
        {"batch_sizes": pb.Histogram(counts=[0] * 5000)},
        {"step_seconds": pb.Histogram(sum=nan)},
        {"process": pb.ProcessStats(cpu_s=inf)},
        {"process": pb.ProcessStats(uptime_s=-1.0)},
        {"transfers": pb.TransferStats(states={f"s{i}": 1 for i in range(65)})},
        {"transfers": pb.TransferStats(transports={f"t{i}": pb.TransportStats() for i in range(65)})},
        {"transfers": pb.TransferStats(sessions={f"e{i}": "tcp" for i in range(4097)})},
    ],
)
def test_what_no_node_says_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        read_stats(pb.NodeStats(**said))


def test_names_that_nobody_knows_are_counted_as_one() -> None:
    said = pb.TransferStats(
        states={'a"\n': 1, "b" * 10**6: 2},
        transports={"x": pb.TransportStats(num_bytes=1), "y": pb.TransportStats(num_bytes=2)},
        sessions={"e": "\\"},
    )
    transfers = read_stats(pb.NodeStats(transfers=said)).transfers
    assert transfers.states == {OTHER: 3}
    assert transfers.transports == {OTHER: TrafficStatistics(num_bytes=3)}
    assert transfers.num_sessions == {OTHER: 1}
