"""The command: subcommands, flags made from the configs, exit codes."""

import ast
import inspect
import itertools
from dataclasses import fields

import pytest

from kvrelay import __version__
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.config import (
    ChatConfig,
    DemoConfig,
    EngineBenchConfig,
    GenerateConfig,
    HealthConfig,
    ModelFetchConfig,
    ModelListConfig,
    ModelShowConfig,
    TopConfig,
    UpConfig,
)
from kvrelay.cli.main import ExitCode, exit_code, main
from kvrelay.decode_node.config import DecodeConfig
from kvrelay.engine import errors
from kvrelay.prefill_node.config import PrefillConfig
from kvrelay.router.config import RouterConfig

CONFIGS = {
    "up": UpConfig,
    "demo": DemoConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "generate": GenerateConfig,
    "chat": ChatConfig,
    "top": TopConfig,
    "health": HealthConfig,
    "model list": ModelListConfig,
    "model fetch": ModelFetchConfig,
    "model show": ModelShowConfig,
    "bench serve": ServeBenchConfig,
    "bench engine": EngineBenchConfig,
}
POSITIONAL = {"generate": "prompt", "health": "address", "model fetch": "model", "model show": "model"}
REQUIRED = {"generate", "model fetch", "model show"}  # what is positional there has no default


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert all(f"\n  {command.split()[0]} " in shown for command in CONFIGS)
    assert all(f"\n  {code.value} " in shown for code in ExitCode)


@pytest.mark.parametrize("group", ["model", "bench"])
def test_the_help_of_a_group_lists_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert all(f"\n  {command.split()[1]} " in shown for command in CONFIGS if command.startswith(f"{group} "))


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"kvrelay {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["--nope"],
        *([group, *more] for group in ("model", "bench") for more in ([], ["nope"], ["--nope"])),
    ],
)
def test_an_unknown_command_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    group = next((f" {group}" for group in ("model", "bench") if group in arguments), "")
    assert captured.err.startswith(f"kvrelay{group}: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", CONFIGS)
def test_the_help_of_a_command_shows_every_flag_with_its_default_and_a_sentence(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == ExitCode.OK
    shown = capsys.readouterr().out
    for field in fields(CONFIGS[command]):
        if field.name != POSITIONAL.get(command):
            assert f"--{field.name.replace('_', '-')} " in shown.replace(",", " ")
    num_flags = shown.count("(default: ") + shown.count("(repeatable)")
    assert num_flags == len(fields(CONFIGS[command])) - (command in REQUIRED)


@pytest.mark.parametrize(
    "config", sorted({base for config in CONFIGS.values() for base in config.__mro__[:-1]}, key=str)
)
def test_every_field_of_every_config_has_a_sentence(config: type) -> None:
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    for field, after in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign):
            sentence = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            assert sentence.endswith("."), f"{config.__name__}.{ast.unparse(field.target)}: {sentence!r}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--decode", "0"], "decode = 0"),
        (["up", "--prefill", "-1"], "prefill = -1"),
        (["up", "--kv-cache-size", "lots"], "size 'lots'"),
        (["up", "--port", "65536"], "port = 65536"),
        (["up", "--drain-timeout-s", "nan"], "drain_timeout_s = nan"),
        (["prefill", "--block-size", "0"], "block_size = 0"),
        (["decode", "--control-port", "-1"], "control_port = -1"),
        (["decode", "--bind", "0.0.0.0"], "bind = 0.0.0.0"),
        (["generate"], "prompt"),
        (["generate", "-", "-"], "prompt: standard input"),
        (["generate", "x", "--timeout-s", "0"], "timeout_s = 0.0"),
        (["model", "show", "x", "--kv-cache-size", "lots"], "size 'lots'"),
        (["bench", "serve", "--concurrency", "0"], "concurrency = 0"),
        (["bench", "serve", "--rate", "nan"], "rate = nan"),
        (["bench", "serve", "--rate", "1", "--concurrency", "2"], "rate: an open loop"),
        (["bench", "serve", "--input-len", "uniform:9:3"], "input_len = 'uniform:9:3'"),
        (["bench", "serve", "--slo-ttft-ms", "0"], "slo_ttft_ms = 0.0"),
        (["bench", "engine", "--repeats", "0"], "repeats = 0"),
        (["bench", "engine", "--batch-sizes", "1", "0"], "batch_sizes = (1, 0)"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr().err
    assert captured.startswith(f"kvrelay {arguments[0]}: {says}")
    assert captured.count("\n") == 1


def test_a_flag_that_cannot_be_read_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--port", "x"])
    assert ended.value.code == ExitCode.USAGE


@pytest.mark.parametrize("command", ["up --model", "demo --model", "model fetch", "model show"])
def test_a_missing_model_is_one_line_and_exit_code_3(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "/no/such/model"]) == ExitCode.MODEL
    captured = capsys.readouterr().err
    assert captured.startswith(f"kvrelay {command.split()[0]}: /no/such/model: no such folder")
    assert captured.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("top_p", 2, "must be in (0, 1]"), ExitCode.USAGE),
        (errors.ConfigError("x"), ExitCode.USAGE),
        (errors.ModelError("x"), ExitCode.MODEL),
        (errors.NotFound("x"), ExitCode.MODEL),
        (errors.Unavailable("x"), ExitCode.UNAVAILABLE),
        (errors.ResourceExhausted("x"), ExitCode.UNAVAILABLE),
        (errors.TransferFailed("PEER_LOST"), ExitCode.UNAVAILABLE),
        (errors.DeadlineExceeded("x"), ExitCode.FAILED),
        (errors.Internal("x"), ExitCode.FAILED),
        (errors.RemoteError("INVALID_ARGUMENT", "x", False), ExitCode.USAGE),
        (errors.RemoteError("NOT_FOUND", "x", False), ExitCode.MODEL),
        (errors.RemoteError("UNAVAILABLE", "x", True), ExitCode.UNAVAILABLE),
        (errors.RemoteError("INTERNAL", "x", False), ExitCode.FAILED),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: errors.KvrelayError, code: ExitCode) -> None:
    assert exit_code(error) == code
