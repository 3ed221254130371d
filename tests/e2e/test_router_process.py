"""The router as a process: ready on a pipe, drained by SIGTERM, one line for what cannot work."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from support.tiny_tokenizers import write_model_folder

from kvrelay.cli.main import ExitCode
from kvrelay.engine.process import READY_FD
from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc


def start(*flags: str, **more: str) -> tuple["subprocess.Popen[str]", int]:
    read_end, write_end = os.pipe()
    router = subprocess.Popen(
        [sys.executable, "-m", "kvrelay.cli", "router", *flags],
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(write_end,),
        env=os.environ | {READY_FD: str(write_end)} | more,
    )
    os.close(write_end)
    return router, read_end


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_router_says_when_it_is_ready_serves_and_ends_well(tmp_path: Path, how: signal.Signals) -> None:
    write_model_folder(tmp_path)
    router, ready = start("--model", str(tmp_path), "--port", "0", "--http-port", "0", "--log-json")
    try:
        with os.fdopen(ready) as pipe:
            said = json.loads(pipe.readline())
        assert said["role"] == "router"
        with grpc.insecure_channel(said["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert stub.GetModel(pb.GetModelRequest(), timeout=10).max_model_len == 128
        router.send_signal(how)
        _, log = router.communicate(timeout=30)
        assert router.returncode == 0
    finally:
        router.kill()
        router.wait()
    events = [json.loads(line) for line in log.splitlines()]
    assert [event["event"] for event in events] == ["config", "listening", "draining", "stopped"]
    assert events[0]["max_requests"] == 2048


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--bind", "0.0.0.0", "--advertise", "host"], "reaches beyond this machine", ExitCode.USAGE),
        (["--port", "70000"], "must be in", ExitCode.USAGE),
        ([], "config.json: missing", ExitCode.MODEL),
    ],
)
def test_a_router_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, flags: list[str], words: str, code: ExitCode
) -> None:
    router, ready = start("--model", str(tmp_path), *flags)
    _, log = router.communicate(timeout=30)
    os.close(ready)
    assert router.returncode == code
    assert words in log.splitlines()[-1]
    assert "Traceback" not in log


def test_a_port_that_another_router_has_is_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    first, ready = start("--model", str(tmp_path), "--port", "0", "--http-port", "0")
    try:
        with os.fdopen(ready) as pipe:
            port = json.loads(pipe.readline())["grpc"].rpartition(":")[2]
        second, other = start("--model", str(tmp_path), "--port", port, "--http-port", "0")
        _, log = second.communicate(timeout=30)
        os.close(other)
        assert second.returncode == ExitCode.USAGE
        assert f"cannot listen on 127.0.0.1:{port}" in log
    finally:
        first.kill()
        first.communicate()
