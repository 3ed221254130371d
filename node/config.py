"""What every node that computes is told, beside the engine's own configuration."""

from dataclasses import dataclass

from kvrelay.engine.config import EngineConfig, KvTransferDtype, KvTransport, check_advertise, check_port
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.traces import check_endpoint


@dataclass(frozen=True, kw_only=True)
class NodeConfig(EngineConfig):
    """A node's addresses and its routers."""

    router: tuple[str, ...] = ("127.0.0.1:7070",)
    """Addresses of the routers to serve; the node dials each."""
    bind: str = "127.0.0.1"
    """Address to listen on; beyond loopback only with a cluster secret or --insecure."""
    advertise: str = ""
    """Address under which others reach this node; empty: the bind address."""
    port: int = 0
    """Port of the node's own gRPC (health, reflection, Stats); 0: any free one."""
    name: str = ""
    """Name in logs and statistics; empty: the role and a part of its epoch."""
    insecure: bool = False
    """Allow a bind beyond loopback without a cluster secret, and KV over plain TCP beyond loopback."""
    kv_transport: KvTransport = "auto"
    """What moves KV between nodes; auto: the fastest that both nodes have and that reaches the other."""
    kv_transfer_dtype: KvTransferDtype = "auto"
    """In what KV travels; auto: the narrower of both nodes' own; bfloat16, int8, fp8: fewer bytes, not exact."""
    data_tls_cert: str = ""
    """PEM file of this node's certificate for KV over TCP with TLS; the three data-tls files go together."""
    data_tls_key: str = ""
    """PEM file of that certificate's key."""
    data_tls_ca: str = ""
    """PEM file of the authority that has signed the other nodes' certificates."""
    prepare_structured_output: bool = False
    """Read the vocabulary for structured outputs at the start: when the first one comes, that takes 0.3 s for 49,000
    tokens and 2.7 s for 262,000, and holds all other requests up for a good part of it."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request, such as http://127.0.0.1:4318; empty:
    none. Needs `pip install 'kvrelay[otel]'`."""
    drain_timeout_s: float = 30.0
    """How long requests may still run after SIGTERM."""
    log_json: bool = False
    """Log JSON lines instead of text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.router:
            raise ConfigError("router: at least one address is needed")
        check_port("port", self.port)
        check_advertise(self.bind, self.advertise)
        check_endpoint(self.otlp_endpoint)
        check_data_tls(self.data_tls_cert, self.data_tls_key, self.data_tls_ca)


def check_data_tls(*files: str) -> None:
    """Raises: ConfigError."""
    if any(files) and not all(files):
        raise ConfigError("data_tls_cert, data_tls_key, data_tls_ca: all three or none")
