from kvrelay.proto import node_pb2 as _node_pb2
from kvrelay.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ControlMessage(_message.Message):
    __slots__ = ("session_nonce", "request_id", "attempt", "hello", "hello_proof", "ping", "offer", "grant", "refuse", "commit", "ack", "revoke", "end")
    SESSION_NONCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HELLO_PROOF_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    session_nonce: bytes
    request_id: str
    attempt: int
    hello: Hello
    hello_proof: HelloProof
    ping: Ping
    offer: Offer
    grant: Grant
    refuse: Refuse
    commit: Commit
    ack: Ack
    revoke: Revoke
    end: End
    def __init__(self, session_nonce: _Optional[bytes] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., hello_proof: _Optional[_Union[HelloProof, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., refuse: _Optional[_Union[Refuse, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "epoch", "nonce", "proof", "model_fingerprint", "kv_layout", "transports", "idle_sessions", "error", "quantization", "kv_transfer_dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: str
    nonce: bytes
    proof: bytes
    model_fingerprint: str
    kv_layout: _node_pb2.KVLayout
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    idle_sessions: _containers.RepeatedScalarFieldContainer[bytes]
    error: _node_pb2.Error
    quantization: str
    kv_transfer_dtype: str
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[str] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., model_fingerprint: _Optional[str] = ..., kv_layout: _Optional[_Union[_node_pb2.KVLayout, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., idle_sessions: _Optional[_Iterable[bytes]] = ..., error: _Optional[_Union[_node_pb2.Error, _Mapping]] = ..., quantization: _Optional[str] = ..., kv_transfer_dtype: _Optional[str] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class HelloProof(_message.Message):
    __slots__ = ("proof", "transport")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    transport: str
    def __init__(self, proof: _Optional[bytes] = ..., transport: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end", "block_ids")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("num_tokens", "token_digest")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    token_digest: bytes
    def __init__(self, num_tokens: _Optional[int] = ..., token_digest: _Optional[bytes] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant_nonce", "ranges")
    GRANT_NONCE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    grant_nonce: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    def __init__(self, grant_nonce: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("reason", "retryable")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retryable: bool
    def __init__(self, reason: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "logprobs", "finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    logprobs: _inference_pb2.Logprobs
    finish_reason: str
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.Logprobs, _Mapping]] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("first_tokens", "num_cached_tokens", "block_digests")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    num_cached_tokens: int
    block_digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., block_digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Revoke(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class End(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PieceHeader(_message.Message):
    __slots__ = ("session_nonce", "grant_nonce", "request_id", "attempt", "offset", "size")
    SESSION_NONCE_FIELD_NUMBER: _ClassVar[int]
    GRANT_NONCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    session_nonce: bytes
    grant_nonce: bytes
    request_id: str
    attempt: int
    offset: int
    size: int
    def __init__(self, session_nonce: _Optional[bytes] = ..., grant_nonce: _Optional[bytes] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...
