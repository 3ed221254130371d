"""Where a chat's messages come from: a terminal with line editing, or whatever standard input is.

What was typed is kept as one JSON string a line, so that a message of several lines comes back as one.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from kvrelay.cli.conversation import MessageReader

MAX_KEPT = 1000
_PROMPT, _MORE = ">>> ", "... "


class PipedInput:
    """One message a line, no prompt."""

    def __init__(self, read_line: Callable[[], str] | None = None) -> None:
        """`read_line` answers "" at the end, as a file's does."""
        self._read_line = read_line or sys.stdin.readline
        self._reader = MessageReader()

    def message(self) -> str:
        """The next message.

        Raises: EOFError at the end.
        """
        while line := self._read_line():
            message = self._reader.feed(line.removesuffix("\n"))
            if message is not None:
                return message
        if self._reader.is_inside:
            return self._reader.finish()
        raise EOFError


class TerminalInput:
    """Lines edited by readline. Text that is pasted comes as one message, however many lines it has."""

    def __init__(self, history: Path | None) -> None:
        """`history`: the file that typed messages are kept in; None: they are not."""
        self._history = history
        self._reader = MessageReader()
        self._was_typed = False  # when Ctrl-C came
        self._readline = _load_readline()
        if self._readline:
            self._readline.parse_and_bind("set enable-bracketed-paste on")
            self._readline.set_auto_history(False)
            for message in read_history(history) if history else ():
                self._readline.add_history(message)

    def message(self) -> str:
        """The next message. Ctrl-C gives up a message that has begun.

        Raises: EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C with nothing typed.
        """
        while True:
            try:
                typed = self._edit(_MORE if self._reader.is_inside else _PROMPT)
            except KeyboardInterrupt:
                print()
                if not self._reader.is_inside and not self._was_typed:
                    raise
                self._reader.finish()
                continue
            # Pasted lines arrive in one piece. They are a message as they stand, unless a fence or a \ says more.
            if "\n" in typed and not self._reader.is_inside and '"""' not in typed:
                return self._keep(typed)
            for line in typed.split("\n"):
                message = self._reader.feed(line)
            if message is not None:
                return self._keep(message)

    def _edit(self, prompt: str) -> str:
        """One line, or what was pasted. Ctrl-C raises, once it is known whether there was anything on the line."""

        def interrupt(_number: int, _frame: object) -> NoReturn:
            self._was_typed = bool(self._readline and self._readline.get_line_buffer())  # emptied by the exception
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return input(prompt)
        finally:
            signal.signal(signal.SIGINT, before)

    def _keep(self, message: str) -> str:
        if message.strip() and self._readline:
            self._readline.add_history(message)
            if self._history:
                append_history(self._history, message)
        return message


def history_file() -> Path:
    """Where what was typed is kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvrelay" / "chat_history"


def read_history(file: Path) -> list[str]:
    """The latest messages, oldest first; whatever is no message of ours is passed over."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-MAX_KEPT:]
    except OSError:
        return []
    messages = []
    for line in lines:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, str) and "\0" not in message:
                messages.append(message)
    return messages


def append_history(file: Path, message: str) -> None:
    """Keep a message, for its owner's eyes alone. A chat goes on where that cannot be."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = read_history(file)
        if len(kept) >= MAX_KEPT:  # rewritten at once with room for as many again as were dropped
            _write(file, kept[MAX_KEPT // 2 :], os.O_TRUNC)
        _write(file, [message], os.O_APPEND)


def _write(file: Path, messages: list[str], how: int) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as kept:
        kept.writelines(json.dumps(message) + "\n" for message in messages)


def _load_readline() -> Any:
    """The standard library's readline; None on a Python that was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
