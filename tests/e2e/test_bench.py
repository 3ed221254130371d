"""Both benchmarks with a real model: the load on a router and its nodes, the engine by itself."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import kvrelay
from support.roles import Client, Roles

from kvrelay.cli.main import ExitCode

pytestmark = pytest.mark.slow

SMALL = ("--kv-cache-size", "8MiB", "--threads", "1")
BLOCK_BYTES = 3 * 2 * 2 * 16 * 12 * 4  # of the tiny model: layers, keys and values, KV heads, tokens, head, float32


@pytest.fixture(scope="module")
def router(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router with a prefill node and a decode node."""
    roles = Roles(tiny_model, tmp_path_factory.mktemp("logs"))
    try:
        address = roles.start("router", "--port", "0").grpc
        for role in ("decode", "prefill"):
            roles.start(role, "--router", address, *SMALL)
        client = Client(address)
        client.wait_until_paired()
        client.close()
        yield address
    finally:
        roles.close()


def bench_serve(router: str, *flags: str) -> dict[str, object]:
    lengths = ("--input-len", "uniform:33:48", "--output-len", "uniform:2:9")
    done = kvrelay("bench", "serve", "--router", router, "--json", "-", *lengths, *flags)
    assert done.returncode == ExitCode.OK, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_closed_loop_gets_exact_outputs_and_sees_each_hand_off(router: str) -> None:
    found = bench_serve(router, "--concurrency", "3", "--num-prompts", "12")
    assert found["summary"]["num_failed"] == 0
    for row in found["requests"]:
        assert row["num_output_tokens"] == row["max_tokens"]
        assert 0 < row["ttft_s"] <= row["end_to_end_s"]
        blocks = -(-row["num_input_tokens"] // 16)
        assert row["handoff"]["kv_bytes"] == blocks * BLOCK_BYTES
        assert row["timings"]["ttft_ms"] <= row["ttft_s"] * 1e3  # the client sees what the router sees, and its own way
    assert found["summary"]["handoff"]["kv_bytes"] == 3 * BLOCK_BYTES


def test_an_open_loop_keeps_its_schedule_and_shared_prefixes_are_found(router: str) -> None:
    flags = ("--rate", "40", "--num-prompts", "12", "--prefix-len", "32", "--seed", "1", "--slo-ttft-ms", "60000")
    bench_serve(router, *flags)
    found = bench_serve(router, *flags)  # finds nothing of the first
    scheduled = [row["scheduled_s"] for row in found["requests"]]
    assert scheduled == sorted(scheduled)
    assert found["summary"]["num_cached_tokens"] == 12 * 32  # the warm-up computed the prefix
    assert found["summary"]["goodput"]["share"] == 1


def test_the_engine_is_measured_without_a_network(tiny_model: Path) -> None:
    sizes = ("--batch-sizes", "1", "3", "--contexts", "8", "--decode-steps", "5", "--prompt-lens", "40")
    done = kvrelay("bench", "engine", "--model", str(tiny_model), *SMALL, *sizes, "--repeats", "2", "--json", "-")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    assert [(m["kind"], m["batch_size"], m["num_tokens"]) for m in found["measurements"]] == [
        ("decode", 1, 8),
        ("decode", 3, 8),
        ("prefill", 1, 40),
    ]
    assert all(run["tokens_per_s"] > 0 for m in found["measurements"] for run in m["runs"])
    assert found["setup"]["num_threads"] == 1
    assert found["setup"]["dtype"] == "float32"
    assert "float32, 1 thread, torch" in done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()[-3:]] == ["decode", "decode", "prefill"]


def test_an_engine_that_is_too_small_says_what_it_lacks(tiny_model: Path) -> None:
    done = kvrelay("bench", "engine", "--model", str(tiny_model), *SMALL, "--batch-sizes", "1", "--contexts", "100")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "kvrelay bench: 229 tokens a sequence: the context has 128\n"
