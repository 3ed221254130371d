"""A conversation and the commands that are typed into it. Pure.

What is sent is the system message, the latest turns that fit the context, and the question. Turns that no longer fit
are not sent again, but stay in what is saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.cli.client import ChatMessage

HELP = """\
/help         this
/system TEXT  tell the model something before the conversation; without TEXT: nothing any more
/retry        ask the last question again
/reset        begin a new conversation; the system message stays
/save FILE    write the conversation to a new file: JSON if it ends in .json, else Markdown
/quit         leave; Ctrl-D does too
\"\"\"           begins and ends a message of several lines; a \\ at a line's end goes on with the next one
//TEXT        a message that begins with /
Ctrl-C        stops an answer; what was said of it stays in the conversation"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, or what was said of it."""

    question: str
    answer: str


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    num_forgotten: int = 0  # oldest turns that are not sent any more

    def messages(self, question: str) -> tuple[ChatMessage, ...]:
        """What to send to have `question` answered."""
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return (*system, *_spoken(self.turns[self.num_forgotten :]), ChatMessage(role="user", content=question))

    def forget_oldest(self) -> bool:
        """Send one turn less from now on. Returns: whether there was one."""
        if self.num_forgotten == len(self.turns):
            return False
        self.num_forgotten += 1
        return True

    def take_back(self) -> str | None:
        """Undo the last turn. Returns: its question."""
        if not self.turns:
            return None
        self.num_forgotten = min(self.num_forgotten, len(self.turns) - 1)
        return self.turns.pop().question

    def reset(self) -> None:
        """Begin anew, under the same system message."""
        self.turns.clear()
        self.num_forgotten = 0

    def transcript(self) -> list[dict[str, str]]:
        """All that was said, as chat APIs take it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": said.role, "content": said.content} for said in _spoken(self.turns)]

    def markdown(self) -> str:
        """All that was said, for a person."""
        return "\n".join(f"## {said['role']}\n\n{said['content'].strip()}\n" for said in self.transcript())


@dataclass(frozen=True, slots=True)
class Command:
    """What a line that begins with one / asks for."""

    name: str
    argument: str = ""


def parse(text: str) -> Command | str:
    """A command, or the message that the text is. The only place that knows what a / means."""
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, _, argument = text[1:].partition(" ")
    return Command(name.strip(), argument.strip())


class MessageReader:
    """Joins typed lines into messages: each is one, but for fences of three quotes and a backslash at a line's end."""

    FENCE = '"""'

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._fenced = False

    @property
    def is_inside(self) -> bool:
        """Whether the message goes on with the next line."""
        return self._fenced or bool(self._lines)

    def feed(self, line: str) -> str | None:
        """The message that ends with this line, if one does."""
        if not self.is_inside and line.lstrip().startswith(self.FENCE):
            self._fenced, line = True, line.lstrip().removeprefix(self.FENCE)
            if not line.rstrip().endswith(self.FENCE):
                self._lines += [line] if line else []
                return None
        if self._fenced:
            ends = line.rstrip().endswith(self.FENCE)
            line = line.rstrip().removesuffix(self.FENCE) if ends else line
            self._lines += [line] if line or not ends else []
            return self.finish() if ends else None
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        self._lines.append(line)
        return self.finish()

    def finish(self) -> str:
        """What was fed since the last message: at the end of the input, or to begin anew."""
        message, self._lines, self._fenced = "\n".join(self._lines), [], False
        return message


def _spoken(turns: Sequence[Turn]) -> list[ChatMessage]:
    return [
        ChatMessage(role=role, content=content)
        for turn in turns
        for role, content in (("user", turn.question), ("assistant", turn.answer))
    ]
