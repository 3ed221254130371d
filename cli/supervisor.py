"""A router and its nodes as child processes: started together, watched while they serve, all gone at the end.

A child leads a session of its own, so that Ctrl-C reaches this process alone; it ends with this process even if that
is killed (engine/process.py). What it logs is kept, the last of it, to be shown if it fails.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from kvrelay.cli.client import NodeView, RouterClient
from kvrelay.cli.config import UpConfig
from kvrelay.engine import process
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ConfigError, KvrelayError, RemoteError, Unavailable

DEFAULT_PORT = 7070
DEFAULT_HTTP_PORT = 8000
_HOST = "127.0.0.1"
POLL_S = 0.05  # while starting only: the router has no event to wait for
RPC_TIMEOUT_S = 5.0
KILL_AFTER_S = 5.0  # on top of the drain's own time
_KEPT_LOG_BYTES = 16 * 1024
_SHOWN_LOG_LINES = 12
_STEPPING_BACK = 19  # niceness: all the way


class RoleEnded(KvrelayError):
    """A child process ended, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What serves now."""

    router: str
    http: str  # empty: there is none
    nodes: tuple[NodeView, ...]
    pids: dict[str, int]  # by name


class Child:
    """One role's process. Belongs to the event loop."""

    def __init__(self, name: str, child: asyncio.subprocess.Process, announcements: asyncio.StreamReader) -> None:
        self.name = name
        self._process = child
        self._announcements = announcements
        self._announced: dict[str, str] | None = None
        self._log = bytearray()
        self._logging = asyncio.create_task(self._keep_log())

    @classmethod
    async def start(cls, name: str, arguments: Iterable[str], *, show_log: bool) -> "Child":
        """Start `kvrelay ARGUMENTS` with this interpreter."""
        read_fd, write_fd = os.pipe()
        announcements = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(announcements), os.fdopen(read_fd, "rb")
        )
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the folders of the current directory are no packages of ours
                "-m",
                "kvrelay.cli",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr if show_log else asyncio.subprocess.PIPE,
                stderr=None if show_log else asyncio.subprocess.STDOUT,
                pass_fds=(write_fd,),
                start_new_session=True,
                env={**os.environ, process.READY_FD: str(write_fd), process.PARENT: str(os.getpid())},
            )
        finally:
            os.close(write_fd)
        return cls(name, child, announcements)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> dict[str, str]:
        """What the role announced. Waits for ever if the process ends instead: `watch` raises then."""
        if self._announced is None:
            line = await self._announcements.readline()
            if not line:
                await asyncio.Event().wait()
            self._announced = json.loads(line)
        return self._announced

    async def watch(self) -> None:
        """Raises: RoleEnded when the process ends."""
        await self.wait()
        code = self._process.returncode or 0
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise RoleEnded(f"{self.name} ended with {how}{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of the log, indented below a line that names it; empty without one."""
        lines = self._log.decode(errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    def send(self, number: signal.Signals) -> None:
        """Signal the process and all that it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def wait(self) -> None:
        """Until the process has ended and its log is read."""
        await self._process.wait()
        await asyncio.shield(self._logging)

    async def _keep_log(self) -> None:
        """Read what the process logs, to its end, so that it never waits for us; keep the last part."""
        while self._process.stdout and (chunk := await self._process.stdout.read(_KEPT_LOG_BYTES)):
            self._log += chunk
            del self._log[:-_KEPT_LOG_BYTES]


def run_until_stopped(main: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run to the end, or to the first SIGINT or SIGTERM, which cancels it. Returns: whether it ran to its end."""

    async def cancelled_by_signals() -> None:
        task = asyncio.current_task()
        assert task
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await main()

    try:
        asyncio.run(cancelled_by_signals())
    except asyncio.CancelledError:
        return False
    return True


@contextlib.asynccontextmanager
async def local_cluster(config: UpConfig) -> AsyncIterator[Cluster]:
    """A router and its nodes on this machine, ready to serve. If one ends, the body is cancelled.

    Raises: RoleEnded if one ends, then or before, or is not ready in time.
    """
    children: list[Child] = []
    try:
        with (
            claim_port("port", config.port, DEFAULT_PORT) as port,
            claim_port("http_port", config.http_port, DEFAULT_HTTP_PORT) as http_port,
        ):
            async with asyncio.TaskGroup() as group:
                watchers: list[asyncio.Task[None]] = []
                yield await _start(
                    config, (port, http_port), children, lambda child: watchers.append(group.create_task(child.watch()))
                )
                for watcher in watchers:
                    watcher.cancel()
    except* Exception as errors:  # noqa: BLE001 (raised again, out of its group)
        raise _most_telling(errors) from None
    finally:
        await _stop(children, config.drain_timeout_s + KILL_AFTER_S)


def _most_telling(errors: BaseExceptionGroup[Exception]) -> Exception:
    """One error of a group: that a role has ended explains what else failed."""
    ended = errors.subgroup(RoleEnded)
    error: BaseException = ended or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


async def _start(
    config: UpConfig, ports: tuple[int, int], children: list[Child], watch: Callable[[Child], None]
) -> Cluster:
    """`ports`: of the router's gRPC and HTTP."""
    port, http_port = ports

    async def start(name: str, arguments: Iterable[str]) -> Child:
        child = await Child.start(name, arguments, show_log=config.verbose)
        children.append(child)
        watch(child)
        return child

    try:
        async with asyncio.timeout(config.ready_timeout_s):
            router = await start("router", router_arguments(config, port, http_port))
            # Where the port is known the nodes start beside the router, and dial until it is there.
            address = f"{_HOST}:{port}" if port else (await router.ready())["grpc"]
            for name, arguments in node_arguments(config, address, len(os.sched_getaffinity(0))):
                await start(name, arguments)
            nodes = await _wait_until_joined(address, config.prefill, config.decode)
            http = (await router.ready())["http"]
    except TimeoutError:
        logs = "".join(f"\n{child.name}:{child.last_lines()}" for child in children)
        raise RoleEnded(f"not ready after {config.ready_timeout_s:.0f} s{logs}") from None
    return Cluster(address, http, nodes, {child.name: child.pid for child in children})


async def _wait_until_joined(router: str, num_prefill: int, num_decode: int) -> tuple[NodeView, ...]:
    async with RouterClient(router) as client:
        while True:
            with contextlib.suppress(RemoteError, Unavailable):
                nodes = await client.nodes(timeout_s=RPC_TIMEOUT_S)
                if all_joined(nodes, num_prefill, num_decode):
                    return nodes
            await asyncio.sleep(POLL_S)


async def _stop(children: list[Child], patience_s: float) -> None:
    """End every child, the router first: it finishes what it has while its nodes still serve.

    SIGTERM, on which a role drains; SIGKILL when patience has run out, or on a second Ctrl-C.
    """
    ends = [asyncio.create_task(child.wait()) for child in children]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for some in (slice(0, 1), slice(1, None)):
                    for child in children[some]:
                        child.send(signal.SIGTERM)
                    await _all_of(ends[some])
    finally:
        for child in children:
            child.send(signal.SIGKILL)
        await _all_of(ends)


async def _all_of(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for tasks, which go on if the wait is cancelled."""
    if tasks:
        await asyncio.wait(tasks)


# --- what the children are told: pure


def router_arguments(config: UpConfig, port: int, http_port: int) -> list[str]:
    """The router's command line. API keys are not on it: they are in the environment."""
    own = ["--model", config.model, "--port", str(port), "--http-port", str(http_port)]
    own += ["--drain-timeout-s", str(config.drain_timeout_s), "--otlp-endpoint", config.otlp_endpoint]
    return ["router", *own]


def node_arguments(config: UpConfig, router: str, num_cores: int) -> list[tuple[str, list[str]]]:
    """Each node's name and command line, the prefill nodes first."""
    common = [*engine_flags(config), "--router", router, "--drain-timeout-s", str(config.drain_timeout_s)]
    common += ["--kv-transport", config.kv_transport, "--kv-transfer-dtype", config.kv_transfer_dtype]
    common += ["--otlp-endpoint", config.otlp_endpoint]
    common += ["--prepare-structured-output"] if config.prepare_structured_output else []
    if config.data_tls_cert:
        common += ["--data-tls-cert", config.data_tls_cert, "--data-tls-key", config.data_tls_key]
        common += ["--data-tls-ca", config.data_tls_ca]
    told = []
    for role, count in (("prefill", config.prefill), ("decode", config.decode)):
        shares = [config.threads] * count if config.threads else divide_cores(num_cores, count)
        # Over the same cores as the decode nodes, whose steps come first.
        steps_back = ["--nice", str(_STEPPING_BACK)] if role == "prefill" and not config.threads | config.nice else []
        for i, threads in enumerate(shares):
            name = f"{role}-{i}"
            told.append((name, [role, "--name", name, "--threads", str(threads), *steps_back, *common]))
    return told


def divide_cores(num_cores: int, num_nodes: int) -> list[int]:
    """Threads of each of some nodes, which may be none: as even as can be, the first ones get what is left over, and
    nobody less than one."""
    if not num_nodes:
        return []
    share, rest = divmod(num_cores, num_nodes)
    return [max(1, share + (i < rest)) for i in range(num_nodes)]


def engine_flags(config: EngineConfig) -> list[str]:
    """The flags of the engine's fields that are not at their defaults, but for threads."""
    flags: list[str] = []
    for field in fields(EngineConfig):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if field.name == "threads" or value == field.default:
            continue
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def all_joined(nodes: Iterable[NodeView], num_prefill: int, num_decode: int) -> bool:
    """Whether all nodes are there, and every prefill node can push to every decode node."""
    prefill = [node for node in nodes if node.role == "prefill"]
    decode = {node.epoch for node in nodes if node.role == "decode"}
    return (
        len(prefill) == num_prefill
        and len(decode) == num_decode
        and all(decode <= set(node.sessions) for node in prefill)
    )


# --- ports


@contextlib.contextmanager
def claim_port(name: str, wanted: int, usual: int) -> Iterator[int]:
    """One of the router's ports: `wanted`; for 0, `usual` if it is free, else 0, which lets the router take any.

    `usual` is also claimed by name while this is held, so that of several that start at once only one tries it.
    Raises: ConfigError, with the field's `name`, if `wanted` is taken.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        if wanted > 0 and not _is_free(wanted):
            raise ConfigError(f"{name} = {wanted}: already in use")
        port = wanted
        if not wanted:
            with contextlib.suppress(OSError):
                claim.bind(f"\0kvrelay-port-{usual}")
                port = usual if _is_free(usual) else 0
        yield port


def _is_free(port: int) -> bool:
    """Whether nobody listens on a port. Connections that linger from an earlier server do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True
