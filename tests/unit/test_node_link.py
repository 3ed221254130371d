"""A node's link to a router."""

import asyncio

import pytest

from kvrelay.engine.errors import Unavailable
from kvrelay.node.link import _write
from kvrelay.proto import node_pb2


class EndedStream:
    """gRPC's, as it is when the router was killed between two writes."""

    async def write(self, message: node_pb2.NodeMessage) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")


async def test_a_stream_that_ended_before_a_word_was_written_is_a_lost_router() -> None:
    """And no end of the link: the next stream is tried."""
    with pytest.raises(Unavailable):
        await _write(EndedStream(), node_pb2.NodeMessage())  # type: ignore[arg-type]
