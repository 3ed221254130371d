"""The router's configuration. The fields' docstrings are the flags' help."""

from dataclasses import dataclass

from kvrelay.engine.config import check_advertise, check_port, parse_size
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.legs import MAX_CHOICES, MAX_LOGPROBS
from kvrelay.engine.traces import check_endpoint

_AT_LEAST_ONE = (
    "max_requests",
    "max_waiting",
    "max_messages",
    "max_role_length",
    "max_choices",
    "max_id_length",
    "max_nodes",
    "max_node_backlog",
    "max_connections",
    "max_prompts",
)
_NOT_NEGATIVE = (
    "max_model_len",
    "max_stop_strings",
    "max_stop_length",
    "max_stop_token_ids",
    "max_logit_bias",
    "max_logprobs",
    "max_bad_words",
    "max_bad_word_length",
    "max_priority",
    "drain_timeout_s",
)
_AT_MOST = (("max_choices", MAX_CHOICES), ("max_logprobs", MAX_LOGPROBS))
_POSITIVE_S = ("default_timeout_s", "max_timeout_s", "node_lease_s", "http_body_timeout_s")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Takes requests in, places them on nodes, carries the tokens home."""

    model: str = "smollm2"
    """A Hugging Face folder, a GGUF file, a hub id, or the name of an embedded model: the one that the nodes serve."""
    bind: str = "127.0.0.1"
    """Address to listen on; beyond loopback only with a cluster secret or --insecure."""
    advertise: str = ""
    """Address under which others reach this router; empty: the bind address."""
    port: int = 7070
    """Port of the router's gRPC, for clients and nodes; 0: any free one."""
    http_port: int = 8000
    """Port of the router's HTTP: OpenAI's API, health; 0: any free one, -1: none."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which every client's call must bear; none: no key is asked for. Other users of this machine see
    flags: KVRELAY_API_KEY in the environment is the better place, with commas between several."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the HTTP API from a browser, such as https://example.org; * for all."""
    max_connections: int = 4096
    """Most open HTTP connections; more are answered 503."""
    max_prompts: int = 128
    """Most prompts of one HTTP call."""
    http_body_timeout_s: float = 30.0
    """How long the body of an HTTP call may take to come."""
    insecure: bool = False
    """Allow a bind beyond loopback without a cluster secret."""
    log_json: bool = False
    """Log JSON lines instead of text."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request, such as http://127.0.0.1:4318; empty:
    none. Needs `pip install 'kvrelay[otel]'`."""
    drain_timeout_s: float = 30.0
    """How long requests may still run after SIGTERM."""
    default_timeout_s: float = 600.0
    """Time limit of a request that names none."""
    max_timeout_s: float = 3600.0
    """Longest time limit that a request may name."""
    max_requests: int = 2048
    """Most requests at once, waiting or running; more are refused with RESOURCE_EXHAUSTED."""
    max_waiting: int = 1024
    """Most requests that wait for their first token, for each decode node; more are refused with RESOURCE_EXHAUSTED."""
    max_model_len: int = 0
    """Longest prompt and output together, in tokens; 0: what the model and the decode nodes allow."""
    max_body_size: str = "4MiB"
    """Largest message that is received, as a size."""
    max_text_size: str = "1MiB"
    """Largest text that is tokenised, as a size in UTF-8."""
    max_messages: int = 1024
    """Most messages in one chat."""
    max_role_length: int = 64
    """Longest role of a chat message, in characters."""
    max_stop_strings: int = 16
    """Most stop strings of one request."""
    max_stop_length: int = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 64
    """Most stop token ids of one request."""
    max_logit_bias: int = 1024
    """Most tokens whose logits one request may change."""
    max_bad_words: int = 128
    """Most bad words of one request."""
    max_bad_word_length: int = 64
    """Longest bad word, in characters."""
    max_logprobs: int = 20
    """Most tokens a position whose log-probabilities one request may ask for, of the output and of the prompt."""
    max_choices: int = 16
    """Most choices (n) of one request."""
    max_priority: int = 100
    """Highest and, below zero, lowest priority that a request may name."""
    max_id_length: int = 256
    """Longest request id and longest cache salt, in characters."""
    node_lease_s: float = 5.0
    """A node that says nothing for this long is lost, even if its stream is open."""
    max_nodes: int = 256
    """Most nodes on this router."""
    max_node_backlog: int = 8192
    """Most messages that wait for a node to read them; a node that lets more pile up is lost."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        for name, limit in _AT_MOST:
            if getattr(self, name) > limit:
                raise ConfigError(f"{name} = {getattr(self, name)}: nodes take at most {limit}")
        for name in _POSITIVE_S:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")
        if self.default_timeout_s > self.max_timeout_s:
            raise ConfigError(f"default_timeout_s = {self.default_timeout_s}: above max_timeout_s")
        self._check_edges()
        parse_size(self.max_body_size)
        parse_size(self.max_text_size)

    def _check_edges(self) -> None:
        check_port("port", self.port)
        check_port("http_port", self.http_port, or_none=True)
        if not all(self.api_key):
            raise ConfigError("api_key: a key must not be empty")
        check_advertise(self.bind, self.advertise)
        check_endpoint(self.otlp_endpoint)

    @property
    def max_body_bytes(self) -> int:
        return parse_size(self.max_body_size)

    @property
    def max_text_bytes(self) -> int:
        return parse_size(self.max_text_size)
