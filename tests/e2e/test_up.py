"""`kvrelay up` with real roles: it serves, several stand side by side, and nothing is left of it, however it ends."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.command import DEADLINE_S, Up, kvrelay, up
from support.tiny_model import make_tiny_model

from kvrelay.cli.main import ExitCode
from kvrelay.cli.supervisor import Child, RoleEnded
from kvrelay.proto import node_pb2, node_pb2_grpc

pytestmark = pytest.mark.slow

SMALL = ("--kv-cache-size", "8MiB", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def ask(running: Up, *more: str) -> dict[str, object]:
    """One greedy answer of eight tokens."""
    options = ["--router", running.router, "--json", "--temperature", "0", "--max-tokens", "8", "--ignore-eos", *more]
    done = kvrelay("generate", "hello there", *options)
    assert done.returncode == ExitCode.OK, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def is_listening(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_up_serves_and_ctrl_c_leaves_nothing(model: str) -> None:
    with up("--model", model, *SMALL) as running:
        assert sorted(running.addresses) == ["decode-0", "prefill-0"]
        answer = ask(running)
        assert len(answer["token_ids"]) == 8
        assert answer["handoff"]["kv_blocks"] == -(-answer["usage"]["prompt_tokens"] // 16)
        assert answer["handoff"]["transport"] == "shm"
        with grpc.insecure_channel(running.addresses["decode-0"]) as channel:
            stats = node_pb2_grpc.NodeStub(channel).Stats(node_pb2.StatsRequest(), timeout=DEADLINE_S)
        assert list(stats.transfers.sessions.values()) == ["shm"]
        assert len(running.pids) == 3
        code, errors = running.stop(signal.SIGINT)
        assert (code, errors) == (ExitCode.OK, "")
        running.wait_until_all_are_gone()
        assert not any(map(is_listening, [running.router, *running.addresses.values()]))


def test_a_node_that_does_both_gives_the_same_answer(model: str) -> None:
    with up("--model", model, *SMALL, "--prefill", "0") as together:
        assert list(together.addresses) == ["decode-0"]
        alone = ask(together)
    assert alone["handoff"] is None
    with up("--model", model, *SMALL) as apart:
        assert ask(apart)["token_ids"] == alone["token_ids"]


def test_several_stand_side_by_side(model: str) -> None:
    with (
        up("--model", model, *SMALL) as first,
        up("--model", model, *SMALL, "--prefill", "2", "--decode", "2") as second,
    ):
        assert first.router != second.router
        assert len(second.pids) == 5
        assert ask(first)["token_ids"] == ask(second)["token_ids"]
        first.stop()
        ask(second)


def test_every_role_answers_health_and_reflection(model: str) -> None:
    with up("--model", model, *SMALL) as running:
        for address in (running.router, *running.addresses.values()):
            with grpc.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                (listed,) = stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
                names = {service.name for service in listed.list_services_response.service}
                assert any(name.startswith("kvrelay.v1.") for name in names)
                assert "grpc.health.v1.Health" in names


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_role_that_dies_stops_all_with_one_clear_line(model: str, role: str) -> None:
    with up("--model", model, *SMALL) as running:
        running.role(role).kill()
        code, errors = running.ended()
        assert code == ExitCode.FAILED
        assert errors.startswith(f"kvrelay up: {role}{'' if role == 'router' else '-0'} ended with SIGKILL\n")
        assert "Traceback" not in errors
        running.wait_until_all_are_gone()


@pytest.mark.chaos
def test_roles_end_when_up_is_killed(model: str) -> None:
    with up("--model", model, *SMALL) as running:
        running.stop(signal.SIGKILL)
        running.wait_until_all_are_gone()


def test_a_port_that_is_taken_is_a_configuration_error(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kvrelay("up", "--model", model, "--port", port)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == f"kvrelay up: port = {port}: already in use\n"


def test_a_role_that_cannot_start_is_told_with_its_own_words(model: str, tmp_path: Path) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes() if file.suffix != ".safetensors" else b"broken")
    done = kvrelay("up", "--model", str(tmp_path), *SMALL)
    assert done.returncode == ExitCode.FAILED
    assert " ended with exit code 3\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_config_is_one_clear_line(tmp_path: Path) -> None:
    done = kvrelay("up", "--model", str(tmp_path))
    assert done.returncode == ExitCode.MODEL
    assert done.stderr == f"kvrelay up: {tmp_path}/config.json: missing\n"


def test_an_interrupted_start_leaves_nothing(model: str) -> None:
    command = [sys.executable, "-m", "kvrelay.cli", "up", "--model", model, *SMALL, "--verbose"]
    with psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.readline()  # a role's first log line: one has started, and not all are ready
        children = process.children(recursive=True)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, output) == (ExitCode.INTERRUPTED, b"")
    gone, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert gone
    assert not alive


def test_a_child_that_ends_is_told_with_its_exit_code_and_last_lines() -> None:
    async def watch() -> None:
        child = await Child.start("generate-0", ["generate"], show_log=False)
        with pytest.raises(RoleEnded) as caught:
            await child.watch()
        assert str(caught.value).splitlines() == [
            "generate-0 ended with exit code 2",
            "  | kvrelay generate: prompt: at least one is needed",
        ]

    asyncio.run(watch())
