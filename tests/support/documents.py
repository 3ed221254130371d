"""The documents' code blocks, and what becomes of each line of them: run, or checked in another way for a reason."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from kvrelay.cli.reference import command_configs, command_name

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

RUN = ("bash", "console", "python")
# Shown, not run: figures, data, messages.
SHOWN = ("", "mermaid", "text", "json", "jsonl", "yaml", "http", "ebnf", "promql", "protobuf", "diff")

_FENCE = re.compile(r"^(```+)(\w*)[^\n]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
_HOST = re.compile(r"[A-Z]\$ ")  # a machine's prompt, where there are several
_PRINTS = re.compile(r"^# prints: (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def prints(self) -> list[str]:
        """What its output has, in this order, each somewhere in a line of its own."""
        return _PRINTS.findall(self.text)


@dataclass(frozen=True, slots=True)
class Excepted:
    """A command that is not run, why, and what is checked instead."""

    command: str
    reason: str
    verify: Callable[[str], None]

    def check(self) -> None:
        """Raises: what is wrong with it."""
        self.verify(self.command)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a console block, and the lines that it is to print."""

    command: str
    expected: list[str]


def blocks(*languages: str) -> list[Block]:
    """Of all documents; in these languages, if any are named."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for fence in _FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(document, line, fence[2], fence[3]))
    return [block for block in found if not languages or block.language in languages]


def commands(script: str) -> Iterator[str]:
    """The lines of a script, each with what a backslash continues."""
    yield from (line for line in re.split(r"(?<!\\)\n", script) if line.strip() and not line.lstrip().startswith("#"))


def steps(console: str) -> list[Step]:
    """Of a console block: `$ command`, then its output."""
    found: list[Step] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:], []))
        else:
            found[-1].expected.append(line.rstrip())
    return found


def says(expected: Sequence[str], output: str) -> bool:
    """Whether an output has these lines and no others; `...` stands for any lines."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else f"{re.escape(line)}[ ]*\n" for line in expected)
    return re.fullmatch(pattern, output) is not None


# --- what is not run


def _parses(command: str) -> None:
    """Raises: SystemExit, KvrelayError for flags that the command would not take."""
    words = shlex.split(command, comments=True)[1:]
    configs = {command_name(config): config for config in command_configs()}
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in configs)
    tyro.cli(configs[name], prog=f"kvrelay {name}", args=words[len(name.split()) :])


def _is_target(command: str) -> None:
    target = shlex.split(command, comments=True)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"


def _names_files(command: str) -> None:
    named = [word for word in shlex.split(command, comments=True) if "/" in word and "://" not in word]
    assert [word for word in named if not (ROOT / word).exists()] == [], command


def _is_known(command: str) -> None:
    """Nothing to check."""


EXCEPTIONS: tuple[tuple[str, str, Callable[[str], None]], ...] = (
    (r"kvrelay (up|demo|router|prefill|decode)\b", "serves until it is stopped; tests/e2e start all of them", _parses),
    (r"make \w+", "sets up the checkout that the test runs in", _is_target),
    (r"\.ci/run\b", "runs the tests", _names_files),
    (r"\. \.venv/bin/activate", "the test has its own environment", _is_known),
    (r"export KVRELAY_CLUSTER_SECRET=", "the roles of the test have none", _is_known),
    (r"docker ", "needs a Docker daemon", _names_files),
)


def exception(command: str) -> Excepted | None:
    """Whether a command is among those that are not run."""
    bare = _HOST.sub("", command, count=1) if _HOST.match(command) else command
    for pattern, reason, check in EXCEPTIONS:
        if re.match(pattern, bare):
            return Excepted(bare, reason, check)
    assert bare is command, f"{command}: of another machine, and not among the exceptions"
    return None


def defaults_with(address: str) -> dict[str, list[tuple[str, str]]]:
    """By command: the flags whose defaults have this address in them, and those defaults."""
    found: dict[str, list[tuple[str, str]]] = {}
    for config in command_configs():
        for field in dataclasses.fields(config):
            if isinstance(field.default, str) and address in field.default and "Positional" not in str(field.type):
                flag = "--" + field.name.replace("_", "-")
                found.setdefault(command_name(config), []).append((flag, field.default))
    return found


@contextlib.contextmanager
def named(block: Block) -> Iterator[None]:
    """Whatever goes wrong inside names the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {block.name}")
        raise
