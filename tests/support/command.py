"""The `kvrelay` command as a process of a test, and what is left of it afterwards."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

DEADLINE_S = 90.0
_READY = re.compile(r"ready: \S+ at (\S+)(?: and http://\S+)? \((.*)\); Ctrl-C stops\n")


@dataclass
class Up:
    """A `kvrelay up` that serves."""

    process: subprocess.Popen[str]
    router: str
    addresses: dict[str, str]  # of the nodes, by name
    pids: list[int] = field(default_factory=list)  # of the roles

    def role(self, name: str) -> psutil.Process:
        """The process of "router", "prefill" or "decode"."""
        return next(child for child in map(psutil.Process, self.pids) if name in child.cmdline())

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Signal it. Returns: its exit code and what it wrote to standard error."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def wait_until_all_are_gone(self) -> None:
        """Raises: psutil.TimeoutExpired if a role outlives the deadline."""
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(timeout=DEADLINE_S)


def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvrelay.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextlib.contextmanager
def up(*arguments: str) -> Iterator[Up]:
    """`kvrelay up ARGUMENTS`, ready. Afterwards no process of it is left, whatever the test did."""
    command = [sys.executable, "-m", "kvrelay.cli", "up", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    running = Up(process, "", {})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = _READY.fullmatch(line)
        assert ready, f"{line!r}, exit code {process.wait(DEADLINE_S)}: {process.stderr and process.stderr.read()}"
        running.router = ready[1]
        running.addresses = dict(node.split(" ") for node in ready[2].split(", "))
        running.pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
        running.wait_until_all_are_gone()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
