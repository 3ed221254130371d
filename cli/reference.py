"""Prints docs/configuration.md from the config classes: `make docs`. A flag that two commands share stands once."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from types import ModuleType
from typing import Any

from tyro.conf import Positional

from kvrelay.cli import bench_config, config as commands
from kvrelay.decode_node.config import DecodeConfig
from kvrelay.engine.config import EngineConfig
from kvrelay.node.config import NodeConfig
from kvrelay.prefill_node.config import PrefillConfig
from kvrelay.router.config import RouterConfig

_HEADER = """\
# Configuration

Printed from the config classes by `make docs`. A flag is a field with dashes for underscores; `kvrelay COMMAND --help`
shows the same. Switches have a counterpart that turns them off: `--no-prefix-caching`. A wrong value is exit code 2.

| variable | what |
|---|---|
| `KVRELAY_CLUSTER_SECRET` | the same for every role; a flag would show it to every user of the machine |
| `KVRELAY_API_KEY` | keys for the HTTP API and gRPC's clients, with commas between several; as `--api-key` |
| `XDG_CACHE_HOME` | kvrelay's models and compiled kernels lie in its `kvrelay` folder; `~/.cache` where it is not set |
| `HF_HUB_OFFLINE` | 1: a model hub is never asked |
| `CXX` | the C++ compiler for the kernels; `g++` where it is not set |
"""
# What several commands have, then the roles; the clients and measurements follow as `cli/config.py` has them.
_SHARED = (
    ("The engine", "up, demo, prefill, decode, bench engine, bench transfer; by name, the LLM class", EngineConfig),
    ("Every node", "prefill, decode", NodeConfig),
)
_ROLES = (RouterConfig, PrefillConfig, DecodeConfig)


@dataclass(frozen=True, slots=True)
class Flag:
    """One field as the command line has it."""

    name: str
    default: str
    sentence: str


def command_name(config: type[Any]) -> str:
    """`ServeBenchConfig` is of `bench serve`, `ModelListConfig` of `model list`."""
    words = [word.lower() for word in re.findall(r"[A-Z][a-z]+", config.__name__)][:-1]
    return " ".join(reversed(words) if words[-1] == "bench" else words)


def command_configs() -> list[type[Any]]:
    """Of the roles, then of every other command, in the order of their definition."""
    return [*_ROLES, *_defined_in(commands), *_defined_in(bench_config)]


def _defined_in(module: ModuleType) -> list[type[Any]]:
    here = [value for value in vars(module).values() if inspect.isclass(value) and dataclasses.is_dataclass(value)]
    return [config for config in here if config.__module__ == module.__name__]


def render() -> str:
    """The whole page."""
    parts = [_HEADER]
    for title, who, config in _SHARED:
        parts.append(f"## {title}\n\nOf {who}.\n\n{_table(_own_flags(config))}")
    for config in command_configs():
        own, bases = _own_flags(config), [base for base in config.__mro__[1:] if dataclasses.is_dataclass(base)]
        about = " ".join(inspect.cleandoc(config.__doc__ or "").split())
        also = f" Besides, what {_named(bases[0])} has." if bases else ""
        parts.append(f"## {command_name(config)}\n\n{about}{also}\n" + (f"\n{_table(own)}" if own else ""))
    return "\n".join(parts)


def _named(config: type[Any]) -> str:
    shared = {config: f"[{title.lower()}](#{title.lower().replace(' ', '-')})" for title, _, config in _SHARED}
    name = command_name(config)
    return shared.get(config, f"[{name}](#{name.replace(' ', '-')})")


def _own_flags(config: type[Any]) -> list[Flag]:
    """Those that the class itself defines, anew or otherwise than its bases."""
    sentences = dict(_sentences(config))
    own = [field for field in dataclasses.fields(config) if field.name in sentences]
    return [Flag(_flag(field), _default(field), sentences[field.name]) for field in own]


def _flag(field: "dataclasses.Field[Any]") -> str:
    if Positional[str].__metadata__[0] in getattr(field.type, "__metadata__", ()):  # type: ignore[attr-defined]
        return field.name.upper()
    return "--" + field.name.replace("_", "-")


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is MISSING:
        return "" if field.default_factory is MISSING else _shown(field.default_factory())
    return _shown(field.default)


def _shown(value: object) -> str:
    match value:
        case None | "" | ():
            return ""
        case bool():
            return "on" if value else "off"
        case tuple():
            return " ".join(map(_shown, value))
        case float():
            return f"{value:g}"
    return str(value)


def _sentences(config: type[Any]) -> Iterator[tuple[str, str]]:
    """Each field that the class defines, and the string behind it."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = text.value if isinstance(text, ast.Expr) else None
            assert isinstance(value, ast.Constant), f"{config.__name__}.{field.target.id} lacks a sentence"
            yield field.target.id, " ".join(inspect.cleandoc(str(value.value)).split())


def _table(flags: list[Flag]) -> str:
    rows = [f"| `{flag.name}` | {flag.default} | {flag.sentence.replace('|', '&#124;')} |" for flag in flags]
    return "\n".join(["| flag | default | what |", "|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(render(), end="")
