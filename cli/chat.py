"""`kvrelay chat`: a conversation with the model, at a terminal or over pipes.

The event loop runs only while an answer comes in, in between readline has the terminal: so Ctrl-C means what it
should in either, without threads.
"""

import asyncio
import json
import os
import sys
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvrelay.cli.chat_input import PipedInput, TerminalInput, history_file
from kvrelay.cli.client import ChatMessage, ModelView, Piece, RouterClient
from kvrelay.cli.config import ChatConfig
from kvrelay.cli.conversation import HELP, Command, Conversation, Turn, parse
from kvrelay.cli.main import ExitCode, exit_code
from kvrelay.cli.report import one_line
from kvrelay.engine.errors import ConfigError, InvalidArgument, KvrelayError, Unavailable

RPC_TIMEOUT_S = 10.0
# Room that is kept for an answer, at most a quarter of the context; --max-tokens may ask for less.
ROOM_FOR_ANSWER = 512
_DIM, _PLAIN = "\033[2m", "\033[0m"
# A model's words must not steer the terminal. Tabs and line ends may.
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


class Input(Protocol):
    """Where messages come from."""

    def message(self) -> str:
        """The next one. Raises: EOFError, KeyboardInterrupt."""


class Screen:
    """What a chat shows. Answers go to standard output; so does the rest at a terminal, and to standard error else."""

    def __init__(self, *, is_terminal: bool, stats: bool) -> None:
        self._is_terminal = is_terminal
        self._has_colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._stats = stats
        self._at_line_start = True

    def say(self, text: str) -> None:
        """A part of an answer, at once."""
        if text:
            self._at_line_start = text.endswith("\n")
            print(text.translate(_HARMLESS) if self._is_terminal else text, end="", flush=True)

    def end_answer(self, last: Piece | None) -> None:
        """End its line, and show what it took."""
        if not self._at_line_start:
            print(flush=True)
        self._at_line_start = True
        if last and self._stats and last.usage and last.timings:
            self.note(one_line(last.usage, last.timings))

    def note(self, text: str) -> None:
        """A word of the chat's own."""
        if self._has_colours:
            text = f"{_DIM}{text}{_PLAIN}"
        print(text, file=sys.stdout if self._is_terminal else sys.stderr, flush=True)

    def error(self, error: KvrelayError) -> None:
        print(f"kvrelay chat: {error}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Heard:
    """What came of one question."""

    text: list[str] = field(default_factory=list)
    last: Piece | None = None
    was_stopped: bool = False


def run(config: ChatConfig) -> int:
    """Talk until the user leaves or the input ends.

    Returns: 0; where the input is no terminal, the exit code of the first answer that failed. Raises: KvrelayError if
    there is no router to begin with.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(is_terminal=is_terminal, stats=is_terminal if config.stats is None else config.stats)
    source: Input = TerminalInput(history_file() if config.history else None) if is_terminal else PipedInput()
    with asyncio.Runner() as runner:
        client = runner.run(_connect(config.router))
        try:
            chat = Chat(client, runner.run(client.model(timeout_s=RPC_TIMEOUT_S)), config, screen, runner)
            if is_terminal:
                chat.greet()
            code = chat.talk(source)
        finally:
            runner.run(client.__aexit__(None, None, None))
    return ExitCode.OK if is_terminal else code


async def _connect(address: str) -> RouterClient:
    return RouterClient(address)  # made inside its event loop


class Chat:
    """One chat with one router."""

    def __init__(
        self, client: RouterClient, model: ModelView, config: ChatConfig, screen: Screen, runner: asyncio.Runner
    ) -> None:
        self._client = client
        self._model = model
        self._config = config
        self._screen = screen
        self._runner = runner
        self._unanswered: str | None = None  # a question that failed: /retry asks it
        self.conversation = Conversation(system=config.system)

    def greet(self) -> None:
        self._screen.note(
            f"{self._model.model} at {self._config.router}, a context of {self._model.max_model_len:,} tokens;"
            " /help lists the commands, Ctrl-D leaves"
        )

    def talk(self, source: Input) -> int:
        """Answer until the input ends or says /quit. Returns: the exit code of the first answer that failed, or 0."""
        code: int = ExitCode.OK
        while True:
            try:
                said = parse(source.message())
            except (EOFError, KeyboardInterrupt):
                return code
            try:
                if isinstance(said, str):
                    self._ask(said)
                elif said.name == "quit":
                    return code
                else:
                    self._obey(said)
            except KvrelayError as error:
                self._screen.error(error)
                code = code or exit_code(error)

    def _obey(self, command: Command) -> None:
        match command.name:
            case "help":
                self._screen.note(HELP)
            case "reset":
                self.conversation.reset()
                self._unanswered = None
                self._screen.note("a new conversation")
            case "system":
                self.conversation.system = command.argument
                self._screen.note("from the next answer on" if command.argument else "no system message any more")
            case "retry":
                self._retry()
            case "save":
                self._save(command.argument)
            case _:
                raise ConfigError(f"/{command.name}: no such command; /help lists them, // begins a message with /")

    def _retry(self) -> None:
        question = self.conversation.take_back() if self._unanswered is None else self._unanswered
        if question is None:
            raise ConfigError("/retry: nothing was asked yet")
        self._ask(question)

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save: a file is needed")
        file = Path(name).expanduser()
        as_json = json.dumps(self.conversation.transcript(), ensure_ascii=False, indent=1) + "\n"
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(as_json if file.suffix == ".json" else self.conversation.markdown())
        except OSError as error:
            raise ConfigError(f"/save {name}: {error.strerror}") from error
        self._screen.note(f"saved: {file}")

    # --- questions

    def _ask(self, question: str) -> None:
        """Raises: KvrelayError; the conversation is as before then."""
        if not question.strip():
            return
        self._unanswered, heard = question, _Heard()
        try:
            try:
                self._runner.run(self._answer(question, heard))
            except KeyboardInterrupt:  # the task is cancelled by then
                heard.was_stopped = True
        finally:
            self._screen.end_answer(heard.last)
        self._remember(question, heard)

    def _remember(self, question: str, heard: _Heard) -> None:
        answer = "".join(heard.text)
        if heard.was_stopped and not answer:
            self._screen.note("(stopped; /retry asks again)")
            return
        self._unanswered = None
        self.conversation.turns.append(Turn(question, answer))
        if heard.was_stopped:
            self._screen.note("(stopped; what was said stays in the conversation)")
        elif heard.last and heard.last.finish_reason == "length":
            self._screen.note("(cut: as many tokens as the context or --max-tokens allows)")

    async def _answer(self, question: str, heard: _Heard) -> None:
        """Ctrl-C cancels this task, and so the call: the router frees what the answer holds."""
        messages, room = await self._fit(question)
        sampling = self._config.sampling()
        if self._config.max_tokens is not None:
            sampling["max_tokens"] = min(self._config.max_tokens, room)
        pieces = self._client.generate(
            messages,
            model=self._config.model,
            sampling=sampling,
            priority=self._config.priority,
            timeout_s=self._config.timeout_s,
        )
        async with aclosing(pieces):
            async for piece in pieces:
                heard.text.append(piece.text)
                self._screen.say(piece.text)
                heard.last = piece
        if heard.last is None or not heard.last.finish_reason:
            raise Unavailable("the answer stopped before its end")

    async def _fit(self, question: str) -> tuple[tuple[ChatMessage, ...], int]:
        """The latest turns that leave room for an answer, and how many tokens are left for it.

        Raises: InvalidArgument if the question alone is too long.
        """
        context = self._model.max_model_len
        wanted = min(self._config.max_tokens or ROOM_FOR_ANSWER, ROOM_FOR_ANSWER, context // 4)
        before = self.conversation.num_forgotten
        while True:
            messages = self.conversation.messages(question)
            num_tokens = len(await self._client.tokenize(messages, timeout_s=RPC_TIMEOUT_S))
            if num_tokens + wanted <= context or not self.conversation.forget_oldest():
                break
        forgotten = self.conversation.num_forgotten - before
        if num_tokens >= context:
            self.conversation.num_forgotten = before
            with_system = " with the system message" if self.conversation.system else ""
            raise InvalidArgument(
                "message", f"{num_tokens} tokens{with_system}", f"the context holds {context}; say it in fewer words"
            )
        if forgotten:
            turns = "oldest turn is" if forgotten == 1 else f"{forgotten} oldest turns are"
            self._screen.note(f"(the context of {context:,} tokens is full: the {turns} not sent any more)")
        return messages, context - num_tokens
