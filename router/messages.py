"""What the router and the nodes say to each other, before and after protobuf."""

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.legs import Leg, Peer, TraceContext
from kvrelay.engine.request import Request, RequestKey


class Role(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself once, when it registers."""

    role: Role
    epoch: str
    name: str
    version: str
    model_fingerprint: str
    quantization: str = "none"
    kv_layout: KVLayout
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    grpc_address: str
    connector_address: str = ""  # decode nodes only
    device: str = ""
    kernels: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run this leg. `timeout_s` is what is left; the node counts it on its own clock."""

    leg: Leg
    request: Request
    timeout_s: float
    peer_epoch: str = ""
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this attempt any more, or this choice of it."""

    key: RequestKey
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """Every decode node there is now."""

    decode_nodes: tuple[Peer, ...]


ToNode = Start | Cancel | Peers
