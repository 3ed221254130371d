"""How long a router takes to refuse each kind of bad input over gRPC, alone and beside streams that it carries.

    .venv/bin/python bench/bad_input.py [--calls 200] [--streams 32] [--steps-per-s 20]

Run it with nothing beside it. The model must be in the cache: a first `kvrelay demo` puts it there. Router, load and
this client are three processes; the load is the tests' fake decode node, which says a token of every stream in each
step, and the clients that read them. Times are the client's: from the call to its status. CPU is the router's own.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from kvrelay.engine import model_store
from kvrelay.engine.model_info import ModelInfo
from kvrelay.engine.process import READY_FD
from kvrelay.proto import inference_pb2 as pb, inference_pb2_grpc

MODEL = "smollm2"
GENERATE = "/kvrelay.v1.Inference/Generate"
LARGE_BYTES = 100_000  # bodies beyond it are sent a tenth as often


def from_tests(name: str) -> Any:
    """A module of tests/support."""
    folder = str(Path(__file__).resolve().parents[1] / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"support.{name}")


def kinds(info: ModelInfo) -> dict[str, bytes]:
    """Bodies by what is wrong with them."""
    context, vocab_size = info.max_model_len, info.vocab_size

    def request(text: str = "", **sampling: Any) -> bytes:
        message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling))
        if text:
            message.text = text
        else:
            message.token_ids.ids.extend([1, 2, 3])
        return message.SerializeToString()

    def ids(*token_ids: int) -> bytes:
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids)).SerializeToString()

    def chat(num_messages: int, role: str, content: str = "a") -> bytes:
        messages = [pb.ChatMessage(role=role, content=content)] * num_messages
        return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages)).SerializeToString()

    return {
        "no prompt": b"",
        "empty text": pb.GenerateRequest(text="").SerializeToString(),
        "id out of the vocabulary": ids(1, vocab_size),
        "ids that fit, the last one out of it": ids(*[1] * (context - 2), vocab_size),
        "ids over the context": ids(*[1] * (context + 1)),
        "10^6 ids": ids(*[1] * 10**6),
        "text just over the context": request("a b " * (context // 2 + 1)),
        "text of 1 MiB": request("a b " * 2**18),
        "text over 1 MiB": request("a b " * (2**18 + 1)),
        "max_tokens over what fits": request(max_tokens=context),
        "NaN temperature": request(temperature=math.nan),
        "n = 10^6": request(n=10**6),
        "logprobs of the whole vocabulary": request(logprobs=vocab_size),
        "10^5 stop strings": request(stop=["a"] * 10**5),
        "10^5 stop ids": request(stop_token_ids=[1] * 10**5),
        "10^5 bad words": request(bad_words=["a"] * 10**5),
        "most bad words, one without tokens": request(bad_words=[*["aé b" * 16] * 127, " "]),
        "logit_bias of 10^5": request(logit_bias=dict.fromkeys(range(10**5), 1.0)),
        "logit_bias of NaN": request(logit_bias={1: math.nan}),
        "unknown model": pb.GenerateRequest(model="x" * 1000, text="a").SerializeToString(),
        "empty role": chat(1, ""),
        "1,024 messages, over the context": chat(1024, "user", "a b c d"),
        "10^5 messages": chat(10**5, "user"),
        "NUL in the request id": pb.GenerateRequest(request_id="\0", text="a").SerializeToString(),
        "not UTF-8": pb.GenerateRequest(text="a").SerializeToString().replace(b"a", b"\xff"),
        "no protobuf": b"\xff\xff",
        "4 MB of empty messages": from_tests("requests").field(5, b"\x0a\x00" * (2 * 10**6)),
        "body over the limit": request("x" * 5 * 2**20),
    }


def measure(address: str, router: psutil.Process, bodies: dict[str, bytes], num_calls: int) -> dict[str, Any]:
    """By kind: the code, the latencies in ms, the router's CPU in ms a call."""
    found = {}
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(GENERATE)
        for name, body in bodies.items():
            n = num_calls if len(body) <= LARGE_BYTES else max(1, num_calls // 10)
            code, _ = refuse(call, body)
            cpu = sum(router.cpu_times()[:2])
            latencies = sorted(refuse(call, body)[1] for _ in range(n))
            found[name] = {
                "code": code,
                "bytes": len(body),
                "median_ms": statistics.median(latencies),
                "p99_ms": latencies[math.ceil(0.99 * n) - 1],
                "cpu_ms": 1e3 * (sum(router.cpu_times()[:2]) - cpu) / n,
            }
    return found


def refuse(call: Any, body: bytes) -> tuple[str, float]:
    began = time.perf_counter()
    try:
        list(call(body, timeout=30))
    except grpc.RpcError as error:
        return error.code().name, 1e3 * (time.perf_counter() - began)
    raise SystemExit("a bad request was served")


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[int, str]]:
    """A process, and the first line that it says on its pipe."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        command, pass_fds=(write_end,), env=os.environ | {READY_FD: str(write_end)}, stderr=subprocess.DEVNULL
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end) as pipe:
            line = pipe.readline()
        if not line:
            raise SystemExit(f"{command} did not start")
        yield process.pid, line
    finally:
        process.terminate()
        process.wait()


async def load(address: str, num_streams: int, steps_per_s: float) -> None:
    """Be a decode node and the clients of its streams, until terminated."""
    fake = from_tests("fake_node")

    async def read(stub: Any, text: str) -> None:
        while True:
            request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=4000, ignore_eos=True))
            async for _ in stub.Generate(request):
                pass

    node = fake.FakeNode(fake.DECODE, model_store.load_info(MODEL), "load")
    async with node.connected(address), grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        for i in range(num_streams):
            group.create_task(read(inference_pb2_grpc.InferenceStub(channel), f"stream {i}"))
        running = [await node.next_start() for _ in range(num_streams)]
        os.write(int(os.environ[READY_FD]), b"{}\n")
        began = time.monotonic()
        for step in range(4000):
            await node.say(*(fake.delta(start, [1000 + step], first=step) for start in running))
            await asyncio.sleep(max(0.0, began + (step + 1) / steps_per_s - time.monotonic()))
        raise SystemExit("the streams are at their end: fewer calls, please")


def show(quiet: dict[str, Any], loaded: dict[str, Any], num_streams: int) -> None:
    print(f"{'':58}{'alone':>24}{f'beside {num_streams} streams':>22}")
    print(f"{'kind':40}{'answer':19}{'kB':>7}{'median':>8}{'p99':>8}{'CPU':>8}{'median':>8}{'p99':>8}   ms")
    for name, alone in quiet.items():
        beside = loaded[name]
        print(
            f"{name:40}{alone['code']:19}{alone['bytes'] / 1e3:7.0f}{alone['median_ms']:8.2f}{alone['p99_ms']:8.2f}"
            f"{alone['cpu_ms']:8.2f}{beside['median_ms']:8.2f}{beside['p99_ms']:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="calls of each kind; of large bodies a tenth")
    parser.add_argument("--streams", type=int, default=32, help="streams beside (default: 32)")
    parser.add_argument("--steps-per-s", type=float, default=20.0, help="tokens a second of each stream (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--load", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(options.load, options.streams, options.steps_per_s))
        return
    bodies = kinds(model_store.load_info(MODEL))
    router = [sys.executable, "-m", "kvrelay.cli", "router", "--model", MODEL, "--port", "0", "--http-port", "-1"]
    with started(router) as (pid, line):
        address = json.loads(line)["grpc"]
        process = psutil.Process(pid)
        quiet = measure(address, process, bodies, options.calls)
        flags = ["--load", address, "--streams", str(options.streams), "--steps-per-s", str(options.steps_per_s)]
        with started([sys.executable, __file__, *flags]):
            loaded = measure(address, process, bodies, options.calls)
    if options.json:
        print(json.dumps({"alone": quiet, "beside_streams": loaded}, indent=2))
    else:
        show(quiet, loaded, options.streams)


if __name__ == "__main__":
    main()
