"""The `kvrelay` command: finds the subcommand, makes its flags from its config, turns errors into exit codes.

Everything a subcommand needs is imported when it runs, so that `kvrelay --help` and the clients start fast.
"""

import os
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

from kvrelay.engine.errors import ConfigError, KvrelayError, ModelError, NotFound

Config = TypeVar("Config")


class ExitCode(IntEnum):
    """What the process's exit code says; docs/operating.md has the same table."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    UNAVAILABLE = 4
    INTERRUPTED = 130


_HELP = """\
usage: kvrelay COMMAND [OPTIONS]

Disaggregated LLM serving: prefill on one node, decode on another, the KV cache handed over between them.

commands on this machine:
  up          start a router and its nodes, and stop them with Ctrl-C
  demo        the same, ask one question, show where the time went, stop

roles, one process each:
  router      takes requests in, places them on nodes, carries the tokens home
  prefill     computes prompts and pushes their KV to decode nodes
  decode      waits for KV and runs the decode batches

models:
  model       list those on this machine, fetch one, show what one is and takes

clients of a router:
  generate    send prompts, stream the answers
  chat        talk with the model in the terminal
  top         watch the router and its nodes at work
  health      ask whether a router or a node serves

measurements:
  bench       put a load on a router, measure the engine alone, or the transfer of KV

options:
  -h, --help  show this and exit; `kvrelay COMMAND --help` shows a command's own flags
  --version   show the version and exit

exit codes:
  0    done; for up and the roles: stopped by a signal after serving
  1    failed
  2    wrong usage or configuration, or a request that can never be served
  3    the model is missing or broken
  4    unavailable: no router, a node was lost, or too much waits already; may be tried again
  130  interrupted
"""


_MODEL_HELP = """\
usage: kvrelay model COMMAND [OPTIONS]

  list        the embedded models, and what is in the caches
  fetch       make a model ready: fetch, convert, check
  show        what a model is, what it takes, and what would run it

options:
  -h, --help  show this and exit; `kvrelay model COMMAND --help` shows a command's own flags
"""

_BENCH_HELP = """\
usage: kvrelay bench COMMAND [OPTIONS]

  serve       put a load on a running router, or another server: latencies, throughput, goodput
  plot        draw what serve has measured
  engine      measure decode and prefill in this process, without a network
  transfer    move KV between two processes, beside memcpy and bare sockets

options:
  -h, --help  show this and exit; `kvrelay bench COMMAND --help` shows a command's own flags
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code. Raises: SystemExit from the flags' parser (0 for --help, else 2)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0], given[1:]) if given else ("", [])
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return ExitCode.OK
    if command == "--version":
        from kvrelay import __version__

        print(f"kvrelay {__version__}")
        return ExitCode.OK
    if command not in _COMMANDS:
        return _refuse(command)
    try:
        return _COMMANDS[command](rest)
    except KvrelayError as error:
        print(f"kvrelay {command}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left; the interpreter's last flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED


def exit_code(error: KvrelayError) -> ExitCode:
    """The exit code that stands for an error, be it ours or one that another process told us."""
    if isinstance(error, ModelError) or error.code == NotFound.code:
        return ExitCode.MODEL
    if isinstance(error, ConfigError) or error.code == "INVALID_ARGUMENT":
        return ExitCode.USAGE
    return ExitCode.UNAVAILABLE if error.retryable else ExitCode.FAILED


def _refuse(command: str, group: str = "kvrelay") -> ExitCode:
    said = f"no such command: {command!r}" if command else "a command is needed"
    print(f"{group}: {said}; `{group} --help` lists them", file=sys.stderr)
    return ExitCode.USAGE


def _parse(config: type[Config], command: str, arguments: Sequence[str]) -> Config:
    """A config from flags, which tyro makes from its fields. Raises: SystemExit, ConfigError."""
    import tyro

    return tyro.cli(config, prog=f"kvrelay {command}", args=arguments)


def _up(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import UpConfig

    config = _parse(UpConfig, "up", arguments)
    from kvrelay.cli.up import run

    return run(config)


def _demo(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import DemoConfig

    config = _parse(DemoConfig, "demo", arguments)
    from kvrelay.cli.demo import run

    return run(config)


def _router(arguments: Sequence[str]) -> int:
    from kvrelay.router.config import RouterConfig

    config = _parse(RouterConfig, "router", arguments)
    from kvrelay.router.main import run

    return run(config)


def _prefill(arguments: Sequence[str]) -> int:
    from kvrelay.prefill_node.config import PrefillConfig

    config = _parse(PrefillConfig, "prefill", arguments)
    from kvrelay.prefill_node.main import run

    return run(config)


def _decode(arguments: Sequence[str]) -> int:
    from kvrelay.decode_node.config import DecodeConfig

    config = _parse(DecodeConfig, "decode", arguments)
    from kvrelay.decode_node.main import run

    return run(config)


def _generate(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import GenerateConfig

    config = _parse(GenerateConfig, "generate", arguments)
    from kvrelay.cli.generate import run

    return run(config)


def _chat(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import ChatConfig

    config = _parse(ChatConfig, "chat", arguments)
    from kvrelay.cli.chat import run

    return run(config)


def _top(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import TopConfig

    config = _parse(TopConfig, "top", arguments)
    from kvrelay.cli.top import run

    return run(config)


def _health(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import HealthConfig

    config = _parse(HealthConfig, "health", arguments)
    from kvrelay.cli.health import run

    return run(config)


def _model(arguments: Sequence[str]) -> int:
    return _one_of("kvrelay model", _MODEL_COMMANDS, _MODEL_HELP, arguments)


def _bench(arguments: Sequence[str]) -> int:
    return _one_of("kvrelay bench", _BENCH_COMMANDS, _BENCH_HELP, arguments)


def _one_of(
    group: str, commands: dict[str, Callable[[Sequence[str]], int]], help_text: str, arguments: Sequence[str]
) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help"):
        print(help_text, end="")
        return ExitCode.OK
    return commands[command](rest) if command in commands else _refuse(command, group)


def _model_list(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import ModelListConfig

    config = _parse(ModelListConfig, "model list", arguments)
    from kvrelay.cli.model import list_models

    return list_models(config)


def _model_fetch(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import ModelFetchConfig

    config = _parse(ModelFetchConfig, "model fetch", arguments)
    from kvrelay.cli.model import fetch_model

    return fetch_model(config)


def _model_show(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import ModelShowConfig

    config = _parse(ModelShowConfig, "model show", arguments)
    from kvrelay.cli.model import show_model

    return show_model(config)


def _bench_serve(arguments: Sequence[str]) -> int:
    from kvrelay.cli.bench_config import ServeBenchConfig

    config = _parse(ServeBenchConfig, "bench serve", arguments)
    from kvrelay.cli.bench_serve import run

    return run(config)


def _bench_plot(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import PlotBenchConfig

    config = _parse(PlotBenchConfig, "bench plot", arguments)
    from kvrelay.cli.bench_plot import run

    return run(config)


def _bench_engine(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import EngineBenchConfig

    config = _parse(EngineBenchConfig, "bench engine", arguments)
    from kvrelay.cli.bench_engine import run

    return run(config)


def _bench_transfer(arguments: Sequence[str]) -> int:
    from kvrelay.cli.config import TransferBenchConfig

    config = _parse(TransferBenchConfig, "bench transfer", arguments)
    from kvrelay.cli.bench_transfer import run

    return run(config)


_MODEL_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": _model_list,
    "fetch": _model_fetch,
    "show": _model_show,
}
_BENCH_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _bench_serve,
    "plot": _bench_plot,
    "engine": _bench_engine,
    "transfer": _bench_transfer,
}
_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": _up,
    "demo": _demo,
    "router": _router,
    "prefill": _prefill,
    "decode": _decode,
    "generate": _generate,
    "chat": _chat,
    "top": _top,
    "health": _health,
    "model": _model,
    "bench": _bench,
}
