"""What is compared with: where each peer is, and how it is run at its best."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.engine.model_store import resolve

HERE = Path(__file__).resolve().parent
STOP_TIMEOUT_S = 30.0
FOLDER = HERE.parents[1] / ".peers"  # where setup.sh puts them


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Whom a benchmark asks: kvrelay or a peer."""

    name: str
    python: str  # the interpreter of its virtual environment
    model: str
    log: Path  # what it says beside its answers
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def started(
    side: Side, command: Sequence[str], stdin: int = subprocess.DEVNULL, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """One side's process with its own children, none of which outlives the block. What it prints goes to its log."""
    with (
        side.log.open("w") as log,
        subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout or log,
            stderr=log,
            text=True,
            env=os.environ | side.environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end_cleanly_on_sigterm() -> None:
    """Let this process's own `finally`s end what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def kvrelay(folder: Path) -> Side:
    return Side(name="kvrelay", python=sys.executable, model="smollm2", log=folder / "kvrelay.log")


@contextlib.contextmanager
def kvrelay_up(side: Side, flags: Sequence[str]) -> Iterator[str]:
    """A router with its nodes, until the end of the block. Returns: its address."""
    command = [side.python, "-m", "kvrelay.cli", "up", "--model", side.model, *flags]
    with started(side, command, stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        line = up.stdout.readline()
        if not line.startswith("ready:"):
            raise SystemExit(f"kvrelay up did not start: {side.log}")
        yield line.split(" at ")[1].split()[0]


def peer(name: str, folder: Path, cores: list[int]) -> Side:
    """A peer that setup.sh has made. It may use these cores."""
    venv = folder / name
    if not (venv / "made").exists():
        raise SystemExit(f"{venv} is not there: bench/peers/setup.sh {name} --folder {folder}")
    python, log = str(venv / "bin" / "python"), folder / f"{name}.log"
    if name == "llama":
        return Side(name=name, python=python, model=str(folder / "smollm2.gguf"), log=log)
    environment = _vllm_environment(venv, cores)
    return Side(name=name, python=python, model=str(resolve("smollm2")), log=log, environment=environment)


def _vllm_environment(venv: Path, cores: list[int]) -> dict[str, str]:
    preloaded = [venv / "lib" / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # a thread on each
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CACHE_ROOT": str(venv / "cache"),  # compiled code: the second start is faster
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
