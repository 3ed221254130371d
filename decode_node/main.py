"""The decode node as a process: what its core is made of."""

from kvrelay.connector.factory import make_receiver
from kvrelay.connector.transport.tcp import DataTls
from kvrelay.decode_node.config import DecodeConfig
from kvrelay.decode_node.node import DecodeNode
from kvrelay.decode_node.scheduler import DecodeScheduler
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.node.core import NodeCore
from kvrelay.node.main import NodeParts, Role, run_node


def run(config: DecodeConfig) -> int:
    """Run a decode node until it is told to stop. Returns the exit code. Raises: KvrelayError if it cannot start."""
    return run_node(config, Role("decode", lambda parts: _build(config, parts), receives_kv=True))


def _build(config: DecodeConfig, parts: NodeParts) -> tuple[NodeCore, str]:
    executor = parts.executor
    pool = BlockPool(executor.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    scheduler = DecodeScheduler(config, pool, num_host_blocks=executor.num_host_blocks)
    receiver = make_receiver(
        region=executor.region,
        region_fd=executor.region_fd,
        layout=executor.layout,
        fingerprint=parts.info.fingerprint,
        quantization=config.quantization,
        epoch=parts.epoch,
        secret=parts.cluster_secret,
        wake_up=parts.wake,
        bind=config.bind,
        advertise=parts.advertise,
        control_port=config.control_port,
        data_port=config.data_port,
        tcp_port=config.tcp_port,
        transport=config.kv_transport,
        transfer_dtype=config.kv_transfer_dtype,
        insecure=config.insecure,
        data_tls=DataTls.of(config.data_tls_cert, config.data_tls_key, config.data_tls_ca),
        clock=parts.clock,
    )
    engine = Engine(scheduler, executor, parts.info.eos_token_ids, parts.clock)
    core = DecodeNode(engine, scheduler, receiver, parts.clock, parts.on_report, vocab_size=parts.info.vocab_size)
    return core, receiver.address()
