"""From what the router tells of its cluster to what `kvrelay top` draws."""

from kvrelay.cli.client import RouterClient
from kvrelay.cli.top_view import Look, NodeLook


async def look_at(client: RouterClient, *, timeout_s: float, at_s: float) -> Look:
    """The cluster now. Raises: KvrelayError."""
    told = await client.cluster(timeout_s=timeout_s)
    nodes = (
        NodeLook(
            role=node.role,
            epoch=node.epoch,
            name=node.name,
            is_draining=node.draining,
            num_running=node.num_running,
            num_waiting=node.num_waiting,
            tokens_per_s=node.tokens_per_s,
        )
        for node in told.nodes
    )
    return Look(at_s=at_s, model=told.model, num_running=told.num_requests, nodes=tuple(nodes))
