"""NIXL's side of `kvrelay bench transfer`: its UCX backend, host memory, its progress thread off; both ends poll.

    kvrelay bench transfer --peer "nixl=.peers/nixl/bin/python bench/peers/transfer_nixl.py"

This process is P: it writes blocks into the memory of a D, a process of its own, and notifies it. A transfer counts
from the request (its descriptors are prepared beforehand, as an engine does) until D has the notification. Runs in an
environment of its own, without kvrelay (setup.sh nixl).
"""

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

_out = os.fdopen(os.dup(1), "w")  # for our lines alone: NIXL's log goes where standard output did
os.dup2(2, 1)


def make_agent(name: str, pool: Any) -> Any:
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    return agent


def describe(address: int, block_bytes: int, block_ids: list[int]) -> list[tuple[int, int, int]]:
    return [(address + block_id * block_bytes, block_bytes, 0) for block_id in block_ids]


def order(side: int, asked: dict[str, Any], size_bytes: int) -> list[int]:
    """As `kvrelay.connector.bench_blocks` has it."""
    num_blocks = max(1, size_bytes // asked["block_bytes"])
    if not asked["is_scattered"]:
        return list(range(num_blocks))
    ids: list[int] = np.random.default_rng((side, asked["block_bytes"])).permutation(num_blocks).tolist()
    return ids


def decode(size_bytes: int) -> None:
    """D: says where its memory is, then when each notification came. Ends with its standard input."""
    pool = np.zeros(size_bytes, np.uint8) + np.uint8(0)
    agent = make_agent("decode", pool)
    say({"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "address": pool.ctypes.data})
    agent.add_remote_agent(base64.b64decode(json.loads(sys.stdin.readline())["metadata"]))
    for line in sys.stdin:
        cpu_before, landed_ns = time.process_time(), []
        for _ in range(json.loads(line)["count"]):
            while not agent.get_new_notifs():
                os.sched_yield()
            landed_ns.append(time.monotonic_ns())
            say({"landed_ns": landed_ns[-1]})
        say({"cpu_s": time.process_time() - cpu_before})


def say(what: dict[str, Any]) -> None:
    _out.write(json.dumps(what) + "\n")
    _out.flush()


class Prefill:
    """P, and the process that is its D."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._pool = np.ones(size_bytes, np.uint8)
        self._agent = make_agent("prefill", self._pool)
        command = [sys.executable, __file__, str(size_bytes), "decode"]
        self._decode = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._hear()
        self._target = said["address"]
        self._name = self._agent.add_remote_agent(base64.b64decode(said["metadata"]))
        self._tell({"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()})
        self._agent.make_connection(self._name)
        self._prepared: dict[str, tuple[Any, Any]] = {}

    def move(self, asked: dict[str, Any]) -> dict[str, Any]:
        local, remote = self._prepare(asked)
        places, seconds = np.arange(asked["num_blocks"], dtype=np.int32), []
        self._tell({"count": asked["count"]})
        cpu_before = time.process_time()
        for _ in range(asked["count"]):
            began_ns = time.monotonic_ns()
            handle = self._agent.make_prepped_xfer("WRITE", local, places, remote, places, b"landed")
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                return {"error": f"nixl: {state}"}
            seconds.append((self._hear()["landed_ns"] - began_ns) / 1e9)
            self._agent.release_xfer_handle(handle)
        cpu_s = time.process_time() - cpu_before
        return {"seconds": seconds, "cpu_s": cpu_s + self._hear()["cpu_s"]}

    def _prepare(self, asked: dict[str, Any]) -> tuple[Any, Any]:
        key = f"{asked['block_bytes']} {asked['is_scattered']}"
        if key not in self._prepared:
            sides = []
            for side, name, address in ((0, "NIXL_INIT_AGENT", self._pool.ctypes.data), (1, self._name, self._target)):
                blocks = describe(address, asked["block_bytes"], order(side, asked, self._size_bytes))
                sides.append(self._agent.prep_xfer_dlist(name, self._agent.get_xfer_descs(blocks, "DRAM")))
            self._prepared[key] = (sides[0], sides[1])
        return self._prepared[key]

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._decode.stdin is not None
        self._decode.stdin.write(json.dumps(what) + "\n")
        self._decode.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        """What D says next; P's own agent makes progress only when it is asked."""
        assert self._decode.stdout is not None
        line = self._decode.stdout.readline()
        if not line:
            raise SystemExit("nixl: D has ended")
        said: dict[str, Any] = json.loads(line)
        return said


def main() -> None:
    """The first argument: bytes of the pools. Lines of JSON in and out, until standard input ends."""
    size_bytes = int(sys.argv[1])
    if sys.argv[2:] == ["decode"]:
        decode(size_bytes)
        return
    side = Prefill(size_bytes)
    for line in sys.stdin:
        say(side.move(json.loads(line)))


if __name__ == "__main__":
    main()
