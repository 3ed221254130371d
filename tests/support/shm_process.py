"""P's side of shared memory in a process of its own: `python shm_process.py stuck|bare|shared ...`.

stuck ADDRESS EPOCH PEER_EPOCH: P of a hand-off that stands still in the middle of a copy.
bare PATH_ADDRESS NONCE: a writer that has D's pool, and nothing else.
shared PATH_ADDRESS NONCE: the same, with a child that holds the connection; says the child's pid.
"""

import ctypes
import subprocess
import sys

import numpy as np
from support.peer_process import COMMON, KEY, LAYOUT, prefill

from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport import shm
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.shm import ShmWriter
from kvrelay.engine.clock import MonotonicClock


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def copy_half(pieces):
    """Half of the first piece, then nothing more until the process ends."""
    source, target, size = pieces[0].tolist()
    ctypes.memmove(target, source, size // 2)
    say("in the middle")
    sys.stdin.read()


class Silent:
    def heard(self, nonce, message):
        pass

    def written(self, grant, num_bytes):
        say(f"written {num_bytes}")

    def writer_idle(self, grant):
        pass

    def write_failed(self, nonce, reason):
        say(f"failed {reason}")


def stuck(address, epoch, peer_epoch):
    shm.get_copy_pieces = lambda: copy_half
    return prefill("shm", epoch, peer_epoch, address)


def bare(address, nonce):
    """Has the pool once it has written a block."""
    writer = ShmWriter(np.ones((10, LAYOUT.block_bytes), np.uint8), MonotonicClock(), COMMON["secret"])
    link = writer.connect(bytes.fromhex(nonce), address, Silent())
    link.write(GrantId(bytes.fromhex(nonce), b"g" * 16, KEY), [Copy(0, 3, 0, 0, LAYOUT.block_bytes)])
    return writer, link


def shared(address, nonce):
    writer, link = bare(address, nonce)
    while link._talk is None:
        pass
    descriptor = link._talk.socket.fileno()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[descriptor])
    say(f"child {child.pid}")
    return writer, link, child


if __name__ == "__main__":
    kept = {"stuck": stuck, "bare": bare, "shared": shared}[sys.argv[1]](*sys.argv[2:])
    sys.stdin.read()
