"""One half of a hand-off in a process of its own, to be killed: `python peer_process.py TRANSPORT prefill|decode ...`.

P's blocks are of LAYOUT, D's too, or of UNLIKE where the last argument says so. It brings a transfer of P's ten blocks
to the middle, says "ready" on standard output, and waits to be ended.
"""

import sys
import threading
from dataclasses import replace

import numpy as np

from kvrelay.connector.base import (
    Expectation,
    GrantedRange,
    GrantPlan,
    Offer,
    Offered,
    SessionUp,
    TokenRange,
)
from kvrelay.connector.factory import make_receiver, make_sender
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.request import RequestKey
from kvrelay.engine.shared_memory import SharedMemory

LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
UNLIKE = replace(LAYOUT, block_size=8, dtype="bfloat16")  # half as many blocks, of as many bytes
COMMON = {"layout": LAYOUT, "fingerprint": "model", "secret": "s3cret"}
KEY = RequestKey("killed", 0)
NUM_TOKENS, DIGEST = 40, b"d" * 16
FOREVER = float("inf")


def make_region(transport):
    """D's: zeroed, and the memfd that holds it, if the transport needs one."""
    size = (10, LAYOUT.block_bytes)
    if transport != "shm":
        return np.zeros(size, np.uint8), None
    memory = SharedMemory.create(size[0] * size[1], "kvrelay-test")
    return np.frombuffer(memory.buffer, np.uint8).reshape(size), memory.descriptor


def wait_for(connector, woken, kind):
    while True:
        woken.clear()
        if any(isinstance(event, kind) for event in connector.events()):
            return
        woken.wait()


def make_offer(peer_epoch, key=KEY):
    """Of all of P's blocks."""
    return Offer(
        key=key,
        peer_epoch=peer_epoch,
        num_tokens=NUM_TOKENS,
        token_digest=DIGEST,
        block_ids=tuple(range(10)),
        deadline=FOREVER,
    )


def prefill(transport, epoch, peer_epoch, address):
    woken = threading.Event()
    region = np.ones((10, LAYOUT.block_bytes), np.uint8)
    sender = make_sender(region=region, epoch=epoch, wake_up=woken.set, transport=transport, **COMMON)
    sender.connect(peer_epoch, address)
    wait_for(sender, woken, SessionUp)
    sender.offer(make_offer(peer_epoch))
    sender.push(KEY, TokenRange(0, 20))
    return sender


def decode(transport, epoch, peer_epoch, kind="alike"):
    common = COMMON | {"layout": UNLIKE if kind == "unlike" else LAYOUT}
    woken = threading.Event()
    region, region_fd = make_region(transport)
    receiver = make_receiver(
        region=region, region_fd=region_fd, epoch=epoch, wake_up=woken.set, transport=transport, **common
    )
    sys.stdout.write(receiver.address() + "\n")
    sys.stdout.flush()
    wait_for(receiver, woken, SessionUp)
    receiver.expect(
        Expectation(key=KEY, peer_epoch=peer_epoch, num_tokens=NUM_TOKENS, token_digest=DIGEST, deadline=FOREVER)
    )
    wait_for(receiver, woken, Offered)
    receiver.grant(
        KEY, GrantPlan((GrantedRange(0, NUM_TOKENS, tuple(range(NUM_TOKENS // common["layout"].block_size))),))
    )
    return receiver


if __name__ == "__main__":
    kept = {"prefill": prefill, "decode": decode}[sys.argv[2]](sys.argv[1], *sys.argv[3:])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    kept.close()
