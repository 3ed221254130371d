"""The prefill node's configuration."""

from dataclasses import dataclass

from kvrelay.node.config import NodeConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """Computes prompts and pushes their KV to decode nodes."""

    kv_digests: bool = False
    """Send a digest of every KV block with the commit; the decode node checks them before it starts the request."""
