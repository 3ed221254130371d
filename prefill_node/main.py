"""The prefill node as a process: what its core is made of."""

from dataclasses import replace

from kvrelay.connector.factory import make_sender
from kvrelay.connector.transport.tcp import DataTls
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.engine.scheduler import Scheduler
from kvrelay.node.core import NodeCore
from kvrelay.node.main import NodeParts, Role, run_node
from kvrelay.prefill_node.admission import PrefillAdmission
from kvrelay.prefill_node.config import PrefillConfig
from kvrelay.prefill_node.node import PrefillNode


def run(config: PrefillConfig) -> int:
    """Run a prefill node until it is told to stop. Returns the exit code. Raises: KvrelayError if it cannot start."""
    config = replace(config, swap_space="0")  # a prompt that has started is never preempted
    return run_node(config, Role("prefill", lambda parts: _build(config, parts)))


def _build(config: PrefillConfig, parts: NodeParts) -> tuple[NodeCore, str]:
    executor = parts.executor
    pool = BlockPool(executor.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    admission = PrefillAdmission(config.block_size, config.watermark)
    scheduler = Scheduler(config, pool, admission, num_host_blocks=executor.num_host_blocks)
    sender = make_sender(
        region=executor.region,
        layout=executor.layout,
        fingerprint=parts.info.fingerprint,
        quantization=config.quantization,
        epoch=parts.epoch,
        secret=parts.cluster_secret,
        wake_up=parts.wake,
        clock=parts.clock,
        transport=config.kv_transport,
        transfer_dtype=config.kv_transfer_dtype,
        kv_digests=config.kv_digests,
        insecure=config.insecure,
        data_tls=DataTls.of(config.data_tls_cert, config.data_tls_key, config.data_tls_ca),
    )
    engine = Engine(scheduler, executor, parts.info.eos_token_ids, parts.clock, hands_over=True)
    return PrefillNode(engine, sender, parts.clock, parts.on_report, kv_digests=config.kv_digests), ""
