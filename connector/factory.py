"""Makes the two halves from plain values: which transports there are is decided here and nowhere else."""

from collections.abc import Callable

from kvrelay.connector.base import WakeUp
from kvrelay.connector.receiver import Receiver
from kvrelay.connector.sender import Sender
from kvrelay.connector.session import Identity
from kvrelay.connector.staging import MakeWriter
from kvrelay.connector.transport.base import Reader, Region
from kvrelay.connector.transport.inproc import InprocHub, InprocReader, InprocWriter
from kvrelay.connector.transport.shm import ShmWriter
from kvrelay.connector.transport.shm_reader import ShmReader
from kvrelay.connector.transport.tcp import DataTls, is_trusted
from kvrelay.connector.transport.tcp_reader import TcpReader
from kvrelay.connector.transport.tcp_writer import TcpWriter
from kvrelay.connector.transport.ucp_library import has_ucx
from kvrelay.connector.transport.ucx_reader import UcxReader
from kvrelay.connector.transport.ucx_writer import UcxWriter
from kvrelay.connector.transport.zmq import ZmqReader, ZmqWriter
from kvrelay.engine.clock import Clock, MonotonicClock
from kvrelay.engine.config import KvTransferDtype, KvTransport
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.log import fields, get_logger

log = get_logger(__name__)


def make_sender(
    *,
    region: Region,
    layout: KVLayout,
    fingerprint: str,
    epoch: str,
    secret: str,
    wake_up: WakeUp,
    clock: Clock | None = None,
    hub: InprocHub | None = None,
    quantization: str = "none",
    transport: KvTransport = "auto",
    transfer_dtype: KvTransferDtype = "auto",
    kv_digests: bool = False,
    insecure: bool = False,
    data_tls: DataTls | None = None,
) -> Sender:
    """P's half over `region`, P's pool as bytes. With a hub, D's on the same hub are reached through it.

    `transport`: the only one to use; auto: the first in order of preference that a D offers and that reaches it.
    `transfer_dtype`: in what KV travels; auto: as D says, or else the narrower of both pools' dtypes.
    `insecure`: KV may travel in the clear beyond this machine.

    Raises: ConfigError for files that make no TLS, or if the transport named is not there.
    """
    clock = clock or MonotonicClock()
    _check_region(region, layout)
    makers: dict[str, MakeWriter] = {  # the preferred one first
        "shm": lambda over: ShmWriter(over, clock, secret),
        "ucx": lambda over: UcxWriter(over, clock, rdma_only=transport == "auto", insecure=insecure),
        "tcp": lambda over: TcpWriter(over, clock, secret, insecure=insecure, tls=data_tls),
        "zmq": lambda over: ZmqWriter(over, clock, secret),
    }
    if transport == "auto" and not has_ucx():
        del makers["ucx"]
    makers = {name: make for name, make in makers.items() if transport in ("auto", name)}
    if hub is not None:
        makers = {"inproc": lambda over: InprocWriter(hub, over), **makers}
    identity = Identity(
        epoch=epoch,
        fingerprint=fingerprint,
        layout=layout,
        quantization=quantization,
        transfer_dtype=transfer_dtype,
        secret=secret,
    )
    return Sender(identity, region, makers, clock, wake_up, kv_digests=kv_digests)


def make_receiver(
    *,
    region: Region,
    layout: KVLayout,
    fingerprint: str,
    epoch: str,
    secret: str,
    wake_up: WakeUp,
    bind: str = "127.0.0.1",
    advertise: str = "",
    control_port: int = 0,
    data_port: int = 0,
    tcp_port: int = 0,
    region_fd: int | None = None,
    clock: Clock | None = None,
    hub: InprocHub | None = None,
    quantization: str = "none",
    transport: KvTransport = "auto",
    transfer_dtype: KvTransferDtype = "auto",
    insecure: bool = False,
    data_tls: DataTls | None = None,
) -> Receiver:
    """D's half over `region`, D's pool as bytes; listens when it returns. Ports of 0: any free ones.

    `transport`: the only one to offer; auto: all that make sense here. `transfer_dtype`: in what KV travels; auto: as P
    says, or else the narrower of both pools' dtypes. `insecure`: KV may come in the clear from beyond this machine.
    `region_fd`: a memfd that holds the region, for those who can share memory.

    Raises: ConfigError if an address cannot be bound, or what is asked for is not there, or not safe.
    """
    clock = clock or MonotonicClock()
    _check_region(region, layout)
    is_safe = is_trusted(bind, insecure=insecure)
    ucx_port = 0 if transport == "auto" else data_port  # two cannot listen on one
    makers: dict[str, Callable[[], Reader | None]] = {
        "shm": lambda: _shm_reader(region, region_fd, clock, secret, is_asked_for=transport == "shm"),
        "ucx": lambda: UcxReader(region, clock, bind, ucx_port, advertise, insecure=insecure),
        "tcp": lambda: TcpReader(region, clock, secret, bind, tcp_port, advertise, tls=data_tls),
        "zmq": lambda: ZmqReader(region, clock, bind, data_port, advertise, secret),
    }
    if transport == "auto" and not (is_safe and has_ucx()):
        del makers["ucx"]
    if not is_safe and data_tls is None:
        del makers["tcp"]
        if transport == "tcp":
            raise ConfigError(f"kv_transport = tcp: beyond loopback ({bind}) only with data_tls_* or --insecure")
    readers: list[Reader] = []
    try:
        for name, make in makers.items():
            if transport in ("auto", name) and (reader := make()) is not None:
                readers.append(reader)
    except ConfigError:
        for reader in readers:
            reader.close()
        raise
    if hub is not None:
        readers.append(InprocReader(hub, epoch, region))
    identity = Identity(
        epoch=epoch,
        fingerprint=fingerprint,
        layout=layout,
        quantization=quantization,
        transfer_dtype=transfer_dtype,
        secret=secret,
    )
    return Receiver(identity, region, readers, clock, wake_up, bind=bind, port=control_port, advertise=advertise)


def _shm_reader(
    region: Region, region_fd: int | None, clock: Clock, secret: str, *, is_asked_for: bool
) -> Reader | None:
    """None where memory cannot be shared. Raises: ConfigError if it was asked for by name."""
    try:
        if region_fd is None:
            if is_asked_for:
                raise ConfigError("kv_transport = shm: the KV pool lies in memory that cannot be shared")
            return None
        return ShmReader(region, region_fd, clock, secret)
    except ConfigError as error:
        if is_asked_for:
            raise
        log.warning("transport_left_out", extra=fields(transport="shm", reason=error.message))
        return None


def _check_region(region: Region, layout: KVLayout) -> None:
    assert region.dtype.itemsize == 1, "a region is bytes"
    assert region.ndim == 2, "a region is [num_blocks, block_bytes]"
    assert region.shape[1] == layout.block_bytes, "a block is a row"
    assert region.flags.c_contiguous, "blocks lie one after another"
