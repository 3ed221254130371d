"""The `kvrelay` command at a terminal of a test's own: what it shows, keys that are pressed, the window's size."""

import asyncio
import codecs
import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """The side that a person has of a pseudo-terminal with a command on it."""

    def __init__(self, process: Process, fd: int) -> None:
        self.process = process
        self.fd = fd
        self.shown = ""
        self._changed = asyncio.Event()
        self._has_ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            heard = os.read(self.fd, 65536)
        except OSError:  # what Linux says when the command has closed its side
            heard = b""
        if not heard:
            self._has_ended = True
            asyncio.get_running_loop().remove_reader(self.fd)
        self.shown += self._decoder.decode(heard)
        self._changed.set()

    async def expect(self, text: str) -> str:
        """Until `text` is shown. Returns: all before it; what comes behind it is for the next call."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while text not in self.shown:
                    assert not self._has_ended, f"{text!r} is not in {self.shown!r}, and the command has ended"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before

    async def at_rest(self) -> None:
        """Until its main thread sleeps. A Ctrl-C that comes just before Python's readline begins to wait is heard with
        the next key only; no person is so quick."""
        async with asyncio.timeout(DEADLINE_S):
            while self._state() != "S":  # noqa: ASYNC110  the system tells nobody
                await asyncio.sleep(0.001)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """The command hears of it by SIGWINCH."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[Any]:
        """How the terminal treats keys; a command that changes it shall put it back."""
        return termios.tcgetattr(self.fd)

    async def ended(self) -> int:
        """The exit code."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def at_terminal(*arguments: str, home: Path, columns: int = 100, rows: int = 30) -> AsyncIterator[Terminal]:
    """`kvrelay ARGUMENTS`, its history and the like below `home`. Afterwards the process is gone."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(home), "LC_ALL": "C.UTF-8"}
    for name in ("NO_COLOR", "COLUMNS", "LINES", "INPUTRC"):
        environment.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        # The terminal becomes the process's own, so that Ctrl-C and a new size reach it as signals.
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        " from kvrelay.cli.main import main; sys.exit(main(sys.argv[1:]))",
        *arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
