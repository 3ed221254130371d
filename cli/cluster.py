"""From what the router tells of its cluster to what `kvrelay top` draws. Pure."""

from dataclasses import replace

from kvrelay.cli.client import ClusterNodeView, ClusterView, QuantilesView
from kvrelay.cli.top_view import Blocks, Look, NodeLook, Quantiles


def look_of(told: ClusterView, at_s: float) -> Look:
    """The cluster at a moment of the onlooker's clock."""
    router = told.router
    return Look(
        at_s=at_s,
        model=told.model,
        num_running=router.num_running,
        num_waiting=router.num_waiting,
        num_finished=router.num_finished,
        num_failed=router.num_failed,
        num_refused=router.num_refused,
        tokens_per_s=router.tokens_per_s,
        ttft_ms=_quantiles(router.ttft_ms),
        itl_ms=_quantiles(router.itl_ms),
        nodes=tuple(map(_node, told.nodes)),
    )


def _quantiles(found: QuantilesView) -> Quantiles | None:
    return Quantiles(found.p50, found.p90, found.p99) if found.count else None


def _node(told: ClusterNodeView) -> NodeLook:
    known = NodeLook(
        role=told.role,
        epoch=told.epoch,
        name=told.name,
        is_draining=told.draining,
        num_running=told.load.num_running,
        num_waiting=told.load.num_waiting,
        tokens_per_s=told.load.tokens_per_s,
    )
    stats = told.stats
    if stats is None:
        return known
    return replace(
        known,
        age_s=told.stats_age_s,
        blocks=Blocks(
            total=stats.blocks.total,
            free=stats.blocks.free,
            cached=stats.blocks.cached,
            held=stats.blocks.owned,
            quarantined=stats.blocks.quarantined,
        ),
        num_transfers=sum(stats.transfer_states.values()),
        num_transferred_bytes=stats.num_transfer_bytes,
        num_preemptions=stats.num_preemptions,
        num_prefix_queries=stats.num_prefix_queries,
        num_prefix_hits=stats.num_prefix_hits,
        transports=tuple(sorted(name for name, num_bytes in stats.transport_bytes.items() if num_bytes)),
    )
