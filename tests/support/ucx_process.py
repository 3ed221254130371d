"""One end of a ucx data connection in a process of its own, to be killed: `python ucx_process.py write|read ...`.

It does without a control connection, so that what the other end notices, it notices by itself.
"""

import sys
import threading

import numpy as np
from support.recorder import Recorder

from kvrelay.connector.messages import GrantId
from kvrelay.connector.transport.base import Copy
from kvrelay.connector.transport.pieces import PIECE_BYTES
from kvrelay.connector.transport.ucx_reader import UcxReader
from kvrelay.connector.transport.ucx_writer import UcxWriter
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.request import RequestKey

NONCE = b"s" * 32
GRANT = GrantId(NONCE, b"g" * 16, RequestKey("r", 0))
NUM_BLOCKS = 64


def copies(first, end):
    return [Copy(i, i, i, 0, PIECE_BYTES) for i in range(first, end)]


def write(address):
    """The first eight blocks of the grant; the rest never comes."""
    writer = UcxWriter(np.ones((NUM_BLOCKS, PIECE_BYTES), np.uint8), MonotonicClock())
    link = writer.connect(NONCE, address, Recorder())
    link.write(GRANT, copies(0, 8))
    return writer


def write_forever(address):
    """Eight blocks again and again."""
    writer = UcxWriter(np.ones((NUM_BLOCKS, PIECE_BYTES), np.uint8), MonotonicClock())
    link = writer.connect(NONCE, address, Recorder())
    threading.Thread(target=lambda: [link.write(GRANT, copies(0, 8)) for _ in range(20_000)], daemon=True).start()
    return writer


def read():
    reader = UcxReader(np.zeros((NUM_BLOCKS, PIECE_BYTES), np.uint8), MonotonicClock(), "127.0.0.1", 0, "")
    reader.start(Recorder())
    reader.begin_session(NONCE)
    reader.accept(GRANT, range(NUM_BLOCKS))
    sys.stdout.write(reader.endpoint.address + "\n")
    sys.stdout.flush()
    return reader


if __name__ == "__main__":
    kept = {"write": write, "write_forever": write_forever, "read": read}[sys.argv[1]](*sys.argv[2:])
    sys.stdin.read()
    kept.close()
