from kvrelay.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("challenge", "registered", "peers", "start", "cancel", "drain")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    registered: Registered
    peers: Peers
    start: Start
    cancel: Cancel
    drain: Drain
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "router_epoch")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    router_epoch: str
    def __init__(self, nonce: _Optional[bytes] = ..., router_epoch: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("epoch", "connector_address")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    connector_address: str
    def __init__(self, epoch: _Optional[str] = ..., connector_address: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("decode_nodes",)
    DECODE_NODES_FIELD_NUMBER: _ClassVar[int]
    decode_nodes: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, decode_nodes: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "attempt", "leg", "peer_epoch", "prompt_token_ids", "output_token_ids", "sampling", "priority", "timeout_s", "cache_salt", "trace", "bad_word_ids", "choice")
    class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEG_UNSPECIFIED: _ClassVar[Start.Leg]
        LEG_PREFILL: _ClassVar[Start.Leg]
        LEG_DECODE: _ClassVar[Start.Leg]
        LEG_WHOLE: _ClassVar[Start.Leg]
    LEG_UNSPECIFIED: Start.Leg
    LEG_PREFILL: Start.Leg
    LEG_DECODE: Start.Leg
    LEG_WHOLE: Start.Leg
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    leg: Start.Leg
    peer_epoch: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    priority: int
    timeout_s: float
    cache_salt: str
    trace: _inference_pb2.TraceContext
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., leg: _Optional[_Union[Start.Leg, str]] = ..., peer_epoch: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., trace: _Optional[_Union[_inference_pb2.TraceContext, _Mapping]] = ..., bad_word_ids: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., choice: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("register", "step", "load", "draining", "stats")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    register: Register
    step: Step
    load: Load
    draining: Draining
    stats: NodeStats
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("role", "epoch", "name", "nonce", "proof", "version", "model", "model_fingerprint", "kv_layout", "max_model_len", "grpc_address", "connector_address", "num_blocks", "max_num_seqs", "quantization", "device", "kernels")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    epoch: str
    name: str
    nonce: bytes
    proof: bytes
    version: str
    model: str
    model_fingerprint: str
    kv_layout: KVLayout
    max_model_len: int
    grpc_address: str
    connector_address: str
    num_blocks: int
    max_num_seqs: int
    quantization: str
    device: str
    kernels: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., epoch: _Optional[str] = ..., name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[_Union[KVLayout, _Mapping]] = ..., max_model_len: _Optional[int] = ..., grpc_address: _Optional[str] = ..., connector_address: _Optional[str] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., quantization: _Optional[str] = ..., device: _Optional[str] = ..., kernels: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_free_blocks", "num_running", "num_waiting", "num_waiting_tokens", "tokens_per_s", "sessions", "num_wanted_blocks")
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    tokens_per_s: float
    sessions: _containers.RepeatedScalarFieldContainer[str]
    num_wanted_blocks: int
    def __init__(self, num_free_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., sessions: _Optional[_Iterable[str]] = ..., num_wanted_blocks: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("deltas", "load", "cache")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    load: Load
    cache: CacheChange
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache: _Optional[_Union[CacheChange, _Mapping]] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("from_nothing", "evicted", "stored")
    FROM_NOTHING_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    from_nothing: bool
    evicted: _containers.RepeatedScalarFieldContainer[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, from_nothing: _Optional[bool] = ..., evicted: _Optional[_Iterable[int]] = ..., stored: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "first_token_index", "token_ids", "logprobs", "finish_reason", "error", "report", "ended", "prompt_logprobs", "first_prompt_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    finish_reason: str
    error: Error
    report: LegReport
    ended: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    first_prompt_index: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., report: _Optional[_Union[LegReport, _Mapping]] = ..., ended: _Optional[bool] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., first_prompt_index: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class LegReport(_message.Message):
    __slots__ = ("queue_ms", "compute_ms", "num_cached_tokens", "handoff")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    compute_ms: float
    num_cached_tokens: int
    handoff: _inference_pb2.HandoffReport
    def __init__(self, queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., handoff: _Optional[_Union[_inference_pb2.HandoffReport, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockStats(_message.Message):
    __slots__ = ("total", "free", "cached", "owned", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    owned: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., owned: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("states", "num_landed", "num_failed", "num_bytes", "sessions", "transports", "num_dropped")
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TransportStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TransportStats, _Mapping]] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_LANDED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    states: _containers.ScalarMap[str, int]
    num_landed: int
    num_failed: int
    num_bytes: int
    sessions: _containers.ScalarMap[str, str]
    transports: _containers.MessageMap[str, TransportStats]
    num_dropped: int
    def __init__(self, states: _Optional[_Mapping[str, int]] = ..., num_landed: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_bytes: _Optional[int] = ..., sessions: _Optional[_Mapping[str, str]] = ..., transports: _Optional[_Mapping[str, TransportStats]] = ..., num_dropped: _Optional[int] = ...) -> None: ...

class TransportStats(_message.Message):
    __slots__ = ("num_landed", "num_bytes")
    NUM_LANDED_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_landed: int
    num_bytes: int
    def __init__(self, num_landed: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts", "sum")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class ProcessStats(_message.Message):
    __slots__ = ("cpu_s", "resident_bytes", "num_fds", "num_threads", "uptime_s")
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FDS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    cpu_s: float
    resident_bytes: int
    num_fds: int
    num_threads: int
    uptime_s: float
    def __init__(self, cpu_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., num_fds: _Optional[int] = ..., num_threads: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class SwapStats(_message.Message):
    __slots__ = ("num_host_blocks", "num_free_host_blocks", "num_swapped", "num_swapped_out", "num_swapped_in")
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    num_host_blocks: int
    num_free_host_blocks: int
    num_swapped: int
    num_swapped_out: int
    num_swapped_in: int
    def __init__(self, num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_swapped_out: _Optional[int] = ..., num_swapped_in: _Optional[int] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("role", "epoch", "name", "blocks", "transfers", "load", "num_steps", "num_preemptions", "num_prefix_queries", "num_prefix_hits", "swap", "num_tokens", "num_sampled", "step_seconds", "batch_sizes", "num_starts", "num_cancels", "num_errors", "num_remote", "num_expected", "is_healthy", "process")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    SWAP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELS_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    IS_HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    epoch: str
    name: str
    blocks: BlockStats
    transfers: TransferStats
    load: Load
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    swap: SwapStats
    num_tokens: int
    num_sampled: int
    step_seconds: Histogram
    batch_sizes: Histogram
    num_starts: int
    num_cancels: int
    num_errors: int
    num_remote: int
    num_expected: int
    is_healthy: bool
    process: ProcessStats
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., epoch: _Optional[str] = ..., name: _Optional[str] = ..., blocks: _Optional[_Union[BlockStats, _Mapping]] = ..., transfers: _Optional[_Union[TransferStats, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., swap: _Optional[_Union[SwapStats, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_sampled: _Optional[int] = ..., step_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., batch_sizes: _Optional[_Union[Histogram, _Mapping]] = ..., num_starts: _Optional[int] = ..., num_cancels: _Optional[int] = ..., num_errors: _Optional[int] = ..., num_remote: _Optional[int] = ..., num_expected: _Optional[int] = ..., is_healthy: _Optional[bool] = ..., process: _Optional[_Union[ProcessStats, _Mapping]] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("model", "nodes", "num_requests", "router")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    model: str
    nodes: _containers.RepeatedCompositeFieldContainer[ClusterNode]
    num_requests: int
    router: RouterStats
    def __init__(self, model: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[ClusterNode, _Mapping]]] = ..., num_requests: _Optional[int] = ..., router: _Optional[_Union[RouterStats, _Mapping]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("count", "p50", "p90", "p95", "p99")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    def __init__(self, count: _Optional[int] = ..., p50: _Optional[float] = ..., p90: _Optional[float] = ..., p95: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class RouterStats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_refused", "num_finished", "num_failed", "num_left", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_kv_bytes", "window_s", "tokens_per_s", "ttft_ms", "itl_ms", "process")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_refused: int
    num_finished: int
    num_failed: int
    num_left: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_kv_bytes: int
    window_s: float
    tokens_per_s: float
    ttft_ms: Quantiles
    itl_ms: Quantiles
    process: ProcessStats
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_left: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_kv_bytes: _Optional[int] = ..., window_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., ttft_ms: _Optional[_Union[Quantiles, _Mapping]] = ..., itl_ms: _Optional[_Union[Quantiles, _Mapping]] = ..., process: _Optional[_Union[ProcessStats, _Mapping]] = ...) -> None: ...

class ClusterNode(_message.Message):
    __slots__ = ("role", "epoch", "name", "grpc_address", "draining", "load", "stats", "stats_age_s", "version", "quantization", "device", "kernels", "num_blocks", "max_num_seqs", "max_model_len")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    STATS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    role: Role
    epoch: str
    name: str
    grpc_address: str
    draining: bool
    load: Load
    stats: NodeStats
    stats_age_s: float
    version: str
    quantization: str
    device: str
    kernels: str
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., epoch: _Optional[str] = ..., name: _Optional[str] = ..., grpc_address: _Optional[str] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., stats: _Optional[_Union[NodeStats, _Mapping]] = ..., stats_age_s: _Optional[float] = ..., version: _Optional[str] = ..., quantization: _Optional[str] = ..., device: _Optional[str] = ..., kernels: _Optional[str] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...
