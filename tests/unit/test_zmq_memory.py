"""Frames of ZMQ take no fresh pages from the kernel."""

import subprocess
import sys

SCRIPT = """
import resource
from kvrelay.connector.transport.zmq_memory import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def rounds(count):
    for _ in range(count):
        held = [b"x" * 2**20 for _ in range(8)]
        del held
rounds(4)
before = faults()
rounds(32)
print(faults() - before)
"""


def test_memory_of_frames_that_are_gone_is_there_for_those_that_come():
    """In a process of its own: in this one, somebody may have freed a large block before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256  # seen: 0 to 2; a page each, without it, would be 65,536
