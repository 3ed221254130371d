"""Measures transfers: a P in a process of its own pushes blocks to a D in this one, by each transport in turn.

Beside them, in the same turns and over the same blocks, what bounds them: one thread's copies, a bare TCP socket, a
bare Unix socket. And other systems, each a command that speaks lines of JSON (`bench/peers/transfer_nixl.py`).

A throughput counts from P's push, which is granted by then, until D hears that it has landed. The fixed cost is the
time from COMMIT said to landed, of a transfer without any block, and of one of one block. Before the first turn each
transport moves each case once, and what has arrived is compared with what was sent.
"""

import contextlib
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from kvrelay.connector.bench_blocks import BLOCK_SIZE, Case, check, make_cases, new_shared_pool
from kvrelay.connector.bench_peer import Peer
from kvrelay.connector.bench_sides import D_EPOCH, SECRET, DecodeSide, Received, Woken
from kvrelay.connector.bench_sockets import KINDS, SocketReceiver, copy_blocks
from kvrelay.connector.factory import make_receiver
from kvrelay.connector.transport.inproc import NAME as INPROC, InprocHub
from kvrelay.engine.errors import Internal, KvrelayError

MEMCPY = "memcpy"
_BUSY = "while True: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What is measured."""

    transports: tuple[str, ...]
    size_bytes: int
    block_bytes: tuple[int, ...]
    repeats: int
    fixed_transfers: int
    is_loaded: bool
    peers: tuple[tuple[str, str], ...]  # name, command


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one contender and one case: a value a repeat, or for `fixed_us` a value a transfer of all repeats."""

    contender: str
    kind: str  # transport, limit or peer
    case: str
    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    zero_block_us: list[float] = field(default_factory=list)
    one_block_us: list[float] = field(default_factory=list)


class Contender(Protocol):
    """Something that moves blocks."""

    name: str
    kind: str

    def move(self, case: Case, num_blocks: int, count: int) -> "Pass": ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Pass:
    """Transfers one after another."""

    seconds: list[float]
    cpu_s: float  # of all processes that took part


class Remote:
    """The P in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **asked: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Raises: Internal if it failed, or is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise Internal(f"the other side: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Transport:
    """The product over one transport; a session for each case."""

    kind = "transport"

    def __init__(
        self, name: str, pool: Any, pool_fd: int, cases: tuple[Case, ...], remote: Remote, size_bytes: int
    ) -> None:
        self.name = name
        self._pool = pool
        self._pool_fd = pool_fd
        self._remote = remote
        self._counter = itertools.count()
        self._hub = InprocHub() if name == INPROC else None
        self._local = Peer(size_bytes, self._hub) if self._hub else None
        self._threads = ThreadPoolExecutor(1)
        self._sides: dict[str, DecodeSide] = {}
        try:
            for case in cases:
                self._open(case)
        except KvrelayError:
            self.close()
            raise

    def _open(self, case: Case) -> None:
        woken = Woken()
        receiver = make_receiver(
            region=case.region(self._pool),
            region_fd=self._pool_fd,
            layout=case.layout,
            fingerprint="bench",
            epoch=D_EPOCH,
            secret=SECRET,
            wake_up=woken.set,
            hub=self._hub,
            transport="auto" if self._hub else self.name,  # type: ignore[arg-type]
        )
        side = self._sides[case.name] = DecodeSide(receiver, woken)
        asked = {"name": f"{self.name} {case.name}", "transport": self.name, "address": side.address}
        if self._local:
            self._local.connect(case=case, **asked)
        else:
            self._remote.ask(do="connect", case=asdict(case), **asked)
            self._remote.answer()
        side.wait_for_session()

    def move(self, case: Case, num_blocks: int, count: int) -> Pass:
        """`num_blocks` 0: D has the one block of the prompt already."""
        transfers = [f"{next(self._counter)}" for _ in range(count)]
        asked: dict[str, Any] = {
            "name": f"{self.name} {case.name}",
            "num_blocks": max(1, num_blocks),
            "transfers": transfers,
        }
        if self._local:
            sending = self._threads.submit(self._local.send, case=case, **asked)
        else:
            self._remote.ask(do="send", case=asdict(case), **asked)
        tokens = max(1, num_blocks) * BLOCK_SIZE
        received = self._sides[case.name].receive(transfers, tokens, case.order(1)[:num_blocks])
        sent = sending.result() if self._local else self._remote.answer()
        return _pass(sent, received, is_one_process=self._local is not None)

    def close(self) -> None:
        if self._local:
            self._local.close()
        for side in self._sides.values():
            side.close()
        self._threads.shutdown()


class Socket:
    """A bare socket."""

    kind = "limit"

    def __init__(self, name: str, pool: Any, remote: Remote) -> None:
        self.name = name
        self._pool = pool
        self._remote = remote
        self._receiver = SocketReceiver(name)
        remote.ask(do="connect_socket", name=name, address=self._receiver.address)
        remote.answer()

    def move(self, case: Case, num_blocks: int, count: int) -> Pass:
        self._remote.ask(do="send", name=self.name, case=asdict(case), num_blocks=num_blocks, transfers=[""] * count)
        received = self._receiver.receive(case.region(self._pool), case.order(1)[:num_blocks], count)
        return _pass(self._remote.answer(), received)

    def close(self) -> None:
        self._receiver.close()


class Memcpy:
    """One thread's copies within this process."""

    name, kind = MEMCPY, "limit"

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target

    def move(self, case: Case, num_blocks: int, count: int) -> Pass:
        part = case if num_blocks == case.num_blocks else Case(case.name, case.block_bytes, num_blocks, False)
        done = copy_blocks(part.region(self._source), part.region(self._target), part, count)
        return Pass([taken / 1e9 for taken in done.landed_ns], done.cpu_s)

    def close(self) -> None:
        pass


class Foreign:
    """Another system: a command that answers {"block_bytes", "num_blocks", "is_scattered", "count"} with seconds."""

    kind = "peer"

    def __init__(self, name: str, command: str, size_bytes: int) -> None:
        self.name = name
        self._remote = Remote([*shlex.split(command), str(size_bytes)])

    def move(self, case: Case, num_blocks: int, count: int) -> Pass:
        self._remote.ask(
            block_bytes=case.block_bytes, num_blocks=num_blocks, is_scattered=case.is_scattered, count=count
        )
        answer = self._remote.answer()
        return Pass(answer["seconds"], answer["cpu_s"])

    def close(self) -> None:
        self._remote.close()


def run(
    plan: TransferPlan, on_measured: Callable[[str], None] = lambda name: None
) -> tuple[list[Figures], dict[str, str]]:
    """All figures, and why contenders were left out. Raises: KvrelayError."""
    cases = make_cases(plan.size_bytes, plan.block_bytes)
    size_bytes = max(case.size_bytes for case in cases)
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        remote = Remote([sys.executable, "-m", "kvrelay.connector.bench_peer", str(size_bytes)])
        stack.callback(remote.close)
        contenders = _contenders(plan, cases, size_bytes, remote, stack, left_out)
        stack.enter_context(busy_loops(2 if plan.is_loaded else 0))
        found = {
            (c.name, case.name): Figures(contender=c.name, kind=c.kind, case=case.name)
            for c in contenders
            for case in cases
        }
        for turn in range(-1, plan.repeats):  # the first one is not counted
            for case in cases:
                for contender in contenders:
                    _measure(contender, case, plan.fixed_transfers, found[contender.name, case.name], turn >= 0)
                    on_measured(f"{contender.name}, {case.name}")
    return list(found.values()), left_out


def _contenders(
    plan: TransferPlan,
    cases: tuple[Case, ...],
    size_bytes: int,
    remote: Remote,
    stack: contextlib.ExitStack,
    left_out: dict[str, str],
) -> list[Contender]:
    pool, pool_fd = new_shared_pool(size_bytes)
    source = Peer(size_bytes).pool
    makers: list[tuple[str, Callable[[], Contender]]] = [(MEMCPY, lambda: Memcpy(source, pool))]
    makers += [(kind, partial(Socket, kind, pool, remote)) for kind in KINDS]
    makers += [(name, partial(Transport, name, pool, pool_fd, cases, remote, size_bytes)) for name in plan.transports]
    makers += [(name, partial(Foreign, name, command, size_bytes)) for name, command in plan.peers]
    contenders = []
    for name, make in makers:
        try:
            contenders.append(make())
        except (KvrelayError, OSError) as error:
            left_out[name] = str(error)
        else:
            stack.callback(contenders[-1].close)
    for contender in contenders:
        if isinstance(contender, Transport):
            for case in cases:
                contender.move(case, case.num_blocks, 1)
                check(case.region(pool), case, case.num_blocks)
                pool[:] = 0
    return contenders


def _measure(contender: Contender, case: Case, num_fixed: int, figures: Figures, counts: bool) -> None:
    moved = contender.move(case, case.num_blocks, 1)
    one = contender.move(case, 1, num_fixed)
    zero = contender.move(case, 0, num_fixed) if contender.kind == "transport" else Pass([], 0)
    if counts:
        figures.gb_per_s.append(case.size_bytes / moved.seconds[0] / 1e9)
        figures.cpu_s_per_gb.append(moved.cpu_s / case.size_bytes * 1e9)
        figures.one_block_us += [seconds * 1e6 for seconds in one.seconds]
        figures.zero_block_us += [seconds * 1e6 for seconds in zero.seconds]


def _pass(sent: dict[str, Any], received: Received, *, is_one_process: bool = False) -> Pass:
    """Both sides' accounts of the same transfers; a process's CPU time counts once."""
    seconds = [(landed - begun) / 1e9 for begun, landed in zip(sent["begun_ns"], received.landed_ns, strict=True)]
    return Pass(seconds, received.cpu_s if is_one_process else received.cpu_s + sent["cpu_s"])


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes beside it that compute all the time, as a P and a D do."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
