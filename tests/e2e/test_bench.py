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


def test_transfers_are_measured_between_two_processes_beside_their_limits() -> None:
    sizes = ("--size", "1MiB", "--blocks", "16KiB", "--repeats", "2", "--fixed-transfers", "3")
    done = kvrelay("bench", "transfer", *sizes, "--transports", "zmq", "inproc", "--loaded", "--json", "-")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    names = ("memcpy", "tcp socket", "unix socket", "zmq", "inproc")
    measured = {(f["contender"], f["case"]): f for f in found["figures"]}
    assert set(measured) == {(name, case) for name in names for case in ("contiguous", "16 KiB")}
    assert found["left_out"] == {}
    for figures in measured.values():
        assert len(figures["gb_per_s"]) == 2
        assert min(figures["gb_per_s"] + figures["one_block_us"]) > 0
        assert len(figures["one_block_us"]) == 6
        assert len(figures["zero_block_us"]) == (6 if figures["kind"] == "transport" else 0)
    assert "CPU s/GB" in done.stderr


def test_a_peer_that_cannot_start_is_left_out_and_named() -> None:
    sizes = ("--size", "1MiB", "--blocks", "16KiB", "--repeats", "1", "--fixed-transfers", "1")
    done = kvrelay("bench", "transfer", *sizes, "--transports", "inproc", "--peer", "other=/no/such/program")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "left out: other: " in done.stdout


def test_the_exposed_transfer_is_measured_behind_a_real_prefill(tiny_model: Path) -> None:
    flags = ("--prefill", "70", "--chunk", "32", "--prompts", "2", "--transports", "zmq", "--threads", "1")
    done = kvrelay("bench", "transfer", "--model", str(tiny_model), *flags, "--json", "-")
    assert done.returncode == ExitCode.OK, done.stderr
    (found,) = json.loads(done.stdout)["prefill"]
    assert found["num_bytes"] == 5 * BLOCK_BYTES
    for name in ("exposed_ms", "hidden_ms", "prefill_ms"):
        assert len(found[name]) == 2
        assert min(found[name]) > 0
    assert all(
        p + e == pytest.approx(t)
        for p, e, t in zip(found["prefill_ms"], found["exposed_ms"], found["end_to_end_ms"], strict=True)
    )
