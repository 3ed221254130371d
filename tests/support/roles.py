"""Single roles as processes, to be killed and started again, and a client that keeps them busy."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvrelay.proto import inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc

DEADLINE_S = 60.0


@dataclass
class RoleProcess:
    """One role that serves."""

    process: subprocess.Popen[bytes]
    grpc: str
    connector: str = ""
    http: str = ""

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def stats(self) -> node_pb2.NodeStats:
        with grpc.insecure_channel(self.grpc) as channel:
            return node_pb2_grpc.NodeStub(channel).Stats(node_pb2.StatsRequest(), timeout=DEADLINE_S)

    def wait_until_idle(self) -> node_pb2.BlockStats:
        """Until nothing is held, every block accounted for."""
        wait_for(lambda: self.stats().blocks.owned == 0 and not sum(self.stats().transfers.states.values()))
        stats = self.stats()
        assert stats.swap.num_free_host_blocks == stats.swap.num_host_blocks
        blocks = stats.blocks
        assert blocks.free + blocks.cached == blocks.total
        return blocks


@dataclass
class Spawned:
    """One role, ready or not."""

    process: subprocess.Popen[bytes]
    log: Path
    announcements: int  # the pipe on which it will say that it is ready


class Roles:
    """Starts roles, and ends what is left of them."""

    def __init__(self, model: Path, log_folder: Path) -> None:
        self._model = model
        self._log_folder = log_folder
        self._spawned: list[Spawned] = []

    def spawn(self, role: str, *flags: str, cluster_secret: str = "") -> Spawned:
        """`kvrelay ROLE FLAGS`; returns at once."""
        if role == "router" and "--http-port" not in flags:
            flags = (*flags, "--http-port", "0")
        read_fd, write_fd = os.pipe()
        log = self._log_folder / f"{len(self._spawned)}-{role}.log"
        environment = {**os.environ, "KVRELAY_READY_FD": str(write_fd), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvrelay.cli", role, "--model", str(self._model), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd,),
                env=environment | ({"KVRELAY_CLUSTER_SECRET": cluster_secret} if cluster_secret else {}),
            )
        os.close(write_fd)
        self._spawned.append(Spawned(process, log, read_fd))
        return self._spawned[-1]

    def start(self, role: str, *flags: str, cluster_secret: str = "") -> RoleProcess:
        """`kvrelay ROLE FLAGS`; returns when it says that it is ready."""
        spawned = self.spawn(role, *flags, cluster_secret=cluster_secret)
        with os.fdopen(os.dup(spawned.announcements)) as pipe:
            line = pipe.readline()
        assert line, f"{role} did not start: {spawned.log.read_text()}"
        announced = json.loads(line)
        return RoleProcess(
            spawned.process, announced["grpc"], announced.get("connector", ""), announced.get("http", "")
        )

    def close(self) -> None:
        for spawned in self._spawned:
            if spawned.process.poll() is None:
                spawned.process.send_signal(signal.SIGKILL)
            spawned.process.wait(DEADLINE_S)
            os.close(spawned.announcements)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until a condition on another process holds, which tells nobody of its changes."""
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        if condition():
            return
        waiting.wait(0.05)
    raise AssertionError("it did not come to be")


@dataclass
class Outcome:
    """One request's end."""

    tokens: list[int] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    handoff: bool = False


class Client:
    """Talks to one router."""

    def __init__(self, router: str) -> None:
        self._channel = grpc.insecure_channel(router)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = node_pb2_grpc.ClusterStub(self._channel)

    def generate(self, prompt: Sequence[int], max_tokens: int, on_token: Callable[[], None] = lambda: None) -> Outcome:
        """Greedy, past any EOS; how it ended is in the outcome."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        )
        outcome = Outcome()
        try:
            for response in self._inference.Generate(request, timeout=DEADLINE_S):
                outcome.tokens += response.token_ids
                outcome.handoff = outcome.handoff or response.HasField("handoff")
                on_token()
        except grpc.RpcError as error:
            outcome.code, outcome.details = error.code(), error.details()
        return outcome

    def stream(self, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
        """All responses to a request. Raises: grpc.RpcError."""
        return list(self._inference.Generate(request, timeout=DEADLINE_S))

    def nodes(self) -> list[node_pb2.ClusterNode]:
        return list(
            self._cluster.GetCluster(node_pb2.GetClusterRequest(), timeout=DEADLINE_S, wait_for_ready=True).nodes
        )

    def wait_until_paired(self, prefill: int = 1, decode: int = 1) -> None:
        """Until so many nodes are there, and all prefill nodes can push to all decode nodes."""

        def paired() -> bool:
            nodes = self.nodes()
            decodes = {node.epoch for node in nodes if node.role == node_pb2.ROLE_DECODE}
            prefills = [node for node in nodes if node.role == node_pb2.ROLE_PREFILL]
            sessions_up = all(decodes == set(node.load.sessions) for node in prefills)
            return (len(prefills), len(decodes)) == (prefill, decode) and sessions_up

        wait_for(paired)

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def under_load(
    client: Client, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[list[tuple[int, Outcome]]]:
    """Each prompt again and again, on a thread of its own, until the body ends. Collects (prompt's index, outcome)."""
    outcomes: list[tuple[int, Outcome]] = []
    stopping = threading.Event()
    flowing = threading.Barrier(len(prompts) + 1)

    def drive(index: int) -> None:
        started = False

        def on_token() -> None:
            nonlocal started
            if not started:
                started = True
                flowing.wait(DEADLINE_S)

        while not stopping.is_set():
            outcomes.append((index, client.generate(prompts[index], max_tokens, on_token)))
            if outcomes[-1][1].code is not grpc.StatusCode.OK:
                stopping.wait(0.05)  # as a client that tries again does

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    try:
        flowing.wait(DEADLINE_S)  # every stream has brought its first token
        yield outcomes
    finally:
        stopping.set()
        for thread in threads:
            thread.join(DEADLINE_S)
