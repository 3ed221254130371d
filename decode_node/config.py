"""The decode node's configuration."""

from dataclasses import dataclass

from kvrelay.engine.config import check_port
from kvrelay.node.config import NodeConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NodeConfig):
    """Waits for KV from prefill nodes without blocking others, and runs continuous decode batches."""

    control_port: int = 0
    """Port of the connector's control socket, which prefill nodes dial; 0: any free one."""
    data_port: int = 0
    """Port of the connector's ZMQ data socket; 0: any free one."""
    tcp_port: int = 0
    """Port of the connector's plain TCP (or TLS) data socket; 0: any free one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("control_port", "data_port", "tcp_port"):
            check_port(name, getattr(self, name))
