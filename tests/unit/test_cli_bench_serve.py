"""`kvrelay bench serve` against a router that answers without nodes."""

import asyncio
import json
from pathlib import Path

import pytest
from support.fake_router import FakeRouter, serving

from kvrelay.cli import bench_report, bench_serve
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_statistics import Limits, Record, summarise
from kvrelay.cli.client import ModelView, RouterClient
from kvrelay.cli.main import ExitCode, main
from kvrelay.engine.errors import ConfigError

SMALL = {"num_prompts": 6, "input_len": "20", "output_len": "4"}


def measured(
    *, failures: dict[int, str] | None = None, tokens_per_message: int = 1, **options: object
) -> tuple[int, FakeRouter]:
    """Run the command beside a router. Returns: its exit code, and the router."""

    async def beside() -> tuple[int, FakeRouter]:
        async with asyncio.timeout(30), serving() as router:
            router.failures, router.tokens_per_message = failures or {}, tokens_per_message
            config = ServeBenchConfig(router=router.address, **SMALL | options)
            return await asyncio.to_thread(bench_serve.run, config), router

    return asyncio.run(beside())


def test_the_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = measured(concurrency=2, slo_ttft_ms=60_000, slo_tpot_ms=60_000)
    assert code == ExitCode.OK
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "closed loop, 2 at once; tokens in 20, out 4; seed 0" in lines[1]
    rows = {line[:26].strip(): line[26:].split() for line in lines[3:9]}
    assert rows[""] == ["mean", "p50", "p90", "p99", "max"]
    names = ["time to first token, ms", "time per output token, ms", "inter-token gap, ms", "end to end, ms"]
    assert list(rows)[1:] == [*names, "sent late, ms"]
    assert all(len(cells) == 5 and float(cells[4]) >= 0 for name, cells in rows.items() if name)
    totals = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines[10:]}
    assert totals["requests"].startswith("6 in ")
    assert totals["requests"].endswith(" s, 0 failed")
    assert totals["tokens"] == "120 in, 24 out"
    assert totals["cached"] == "18 of the tokens in"
    assert totals["tokens a message"] == "1.00"
    assert totals["goodput"].endswith("100.0% within TTFT 60000 ms and TPOT 60000 ms")
    assert "exposed transfer 1.5" in totals["medians, ms"]
    assert totals["hand-off, medians"] == "368,640 bytes, landed 7.0 ms after the grant"


def test_each_request_asks_for_its_exact_output_and_the_same_load_comes_again() -> None:
    _, first = measured(concurrency=3, input_len="uniform:5:30", output_len="uniform:1:9", seed=4)
    _, second = measured(rate=500.0, input_len="uniform:5:30", output_len="uniform:1:9", seed=4)
    assert len(first.requests) == 6 + 1  # one to warm up
    for request in first.requests:
        assert request.sampling.ignore_eos
        assert request.sampling.temperature == 0
        assert 1 <= request.sampling.max_tokens <= 9
        assert 5 <= len(request.token_ids.ids) <= 30
        assert not {2, 5} & set(request.token_ids.ids)  # EOS
        assert max(request.token_ids.ids) < 100
        assert request.timeout_s == 600

    def seen(router: FakeRouter) -> list[tuple[int, ...]]:
        return sorted(tuple(request.token_ids.ids) for request in router.requests)

    assert seen(first) == seen(second)


def test_a_load_finds_nothing_in_the_cache_of_the_last_one_unless_told_to() -> None:
    salts = [{request.cache_salt for request in measured()[1].requests} for _ in range(2)]
    assert [len(salt) for salt in salts] == [1, 1]  # one salt for all of a load, so that prefixes are shared
    assert "" not in salts[0] | salts[1]
    assert salts[0] != salts[1]
    _, told = measured(cache_salt="mine")
    assert {request.cache_salt for request in told.requests} == {"mine"}


def test_json_has_every_request_s_own_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    measured(tokens_per_message=3, json=str(file), warmup=2)
    found = json.loads(file.read_text())
    assert found["command"] == "bench serve"
    assert found["config"]["input_len"] == "20"
    assert found["model"]["vocab_size"] == 100
    assert found["machine"]["num_cores"] >= 1
    assert found["summary"]["ttft_ms"]["count"] == 6
    assert found["summary"]["tokens_per_message"] == 2.0
    assert [row["index"] for row in found["requests"]] == list(range(6))
    for row in found["requests"]:
        assert len(row["message_s"]) == 2
        assert row["ttft_s"] == row["message_s"][0] - row["scheduled_s"]
        assert row["tpot_s"] == pytest.approx((row["end_s"] - row["message_s"][0]) / 3)
        assert row["timings"]["exposed_transfer_ms"] == 1.5


def test_json_on_standard_output_stands_there_alone(capsys: pytest.CaptureFixture[str]) -> None:
    measured(json="-")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["summary"]["num_requests"] == 6
    assert "time to first token" in captured.err


def test_a_failed_request_is_an_exit_code_and_the_others_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = measured(failures={2: "RESOURCE_EXHAUSTED", 4: "RESOURCE_EXHAUSTED"})
    assert code == ExitCode.UNAVAILABLE
    captured = capsys.readouterr()
    assert " s, 2 failed, 2 RESOURCE_EXHAUSTED" in captured.out
    assert "2 of 6 requests failed, the first: request 1: as asked" in captured.err
    code, _ = measured(failures={1: "INTERNAL"})
    assert code == ExitCode.FAILED


def test_a_warm_up_that_fails_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def beside() -> int:
        async with serving() as router:
            router.failures = {0: "INVALID_ARGUMENT"}
            return await asyncio.to_thread(main, ["bench", "serve", "--router", router.address, "--input-len", "20"])

    assert asyncio.run(beside()) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "kvrelay bench: request -1: as asked\n"


def test_a_time_limit_ends_a_load_without_a_number_of_prompts() -> None:
    code, router = measured(num_prompts=0, duration_s=0.2)
    assert code == ExitCode.OK
    assert len(router.requests) > 1
    code, router = measured(num_prompts=3, duration_s=20.0)
    assert len(router.requests) == 3 + 1


def test_a_load_that_does_not_fit_the_model_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="up to 184 tokens in and out: the model's context has 128"):
        measured(input_len="180")


def test_a_file_that_cannot_be_written_loses_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        measured(json=str(tmp_path / "none" / "x.json"))
    assert "time to first token" in capsys.readouterr().out


def test_a_load_that_ran_late_itself_says_so() -> None:
    def summary(lateness_s: float) -> list[str]:
        times = {"scheduled_s": 1.0, "sent_s": 1.0 + lateness_s, "end_s": 3.0, "message_s": (2.0,)}
        record = Record(index=0, num_input_tokens=1, num_output_tokens=1, max_tokens=1, **times)
        return bench_report.warnings(summarise([record], Limits()))

    assert summary(0.004) == []
    (warning,) = summary(0.2)
    assert "200.0 ms or more after its time" in warning


def test_the_client_reads_the_model() -> None:
    async def ask() -> ModelView:
        async with serving() as router, RouterClient(router.address) as client:
            return await client.model(timeout_s=5)

    assert asyncio.run(ask()) == ModelView(
        model="fake",
        architecture="FakeForCausalLM",
        vocab_size=100,
        max_model_len=128,
        eos_token_ids=(2, 5),
        bos_token_id=None,
    )


def test_a_sweep_measures_each_rate_with_a_cache_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    code, router = measured(rates="50,200", slo_ttft_ms=60_000, json=str(file), num_prompts=3)
    assert code == ExitCode.OK
    found = json.loads(file.read_text())
    assert [run["rate"] for run in found["runs"]] == [50, 200]
    assert [len(run["requests"]) for run in found["runs"]] == [3, 3]
    assert all(run["summary"]["goodput"]["count"] == 3 for run in found["runs"])
    assert len({request.cache_salt for request in router.requests}) == 2
    out = capsys.readouterr().out
    assert "open loops, 50,200 arrivals a second" in out
    assert out.index("50 arrivals a second\n") < out.index("200 arrivals a second\n")


def test_a_trace_is_replayed_at_its_own_times_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    rows = [(1000, 20, 4), (1200, 30, 2), (1300, 500, 5), (1600, 10, 3)]
    trace.write_text(
        "".join(json.dumps({"timestamp": t, "input_length": i, "output_length": o}) + "\n" for t, i, o in rows)
    )
    code, _ = measured(trace=str(trace), time_scale=0.1, json=str(file), num_prompts=0)
    assert code == ExitCode.OK
    found = json.loads(file.read_text())["requests"]
    assert [row["scheduled_s"] for row in found] == pytest.approx([0, 0.02, 0.06])
    assert [(row["num_input_tokens"], row["num_output_tokens"]) for row in found] == [(20, 4), (30, 2), (10, 3)]
    assert "1 of the trace's 4 requests do not fit the model's context of 128 tokens" in capsys.readouterr().err
    measured(trace=str(trace), time_scale=0.1, json=str(file), num_prompts=2)
    assert len(json.loads(file.read_text())["requests"]) == 2


def test_conversations_are_prompts_of_their_own_tokens_and_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(question: str, answer: str) -> dict[str, object]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    file = tmp_path / "share.json"
    file.write_text(json.dumps([told("a bb", "x y z"), told("ccc", "x"), told("d " * 200, "x"), told("  ", "x")]))
    code, router = measured(sharegpt=str(file), num_prompts=5, warmup=0)
    assert code == ExitCode.OK
    asked = {(tuple(request.token_ids.ids), request.sampling.max_tokens) for request in router.requests}
    assert asked == {((1, 2), 3), ((3,), 1)}
    assert "the file has only 2 conversations that fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rates": "1,x"}, "rates = '1,x': expected numbers and commas"),
        ({"rates": "1,0"}, "rates = 1,0: must be positive"),
        ({"rates": "1", "rate": 2.0}, "rate: not together with --rates"),
        ({"trace": "x", "rates": "1"}, "rates: not together with --trace"),
        ({"trace": "x", "concurrency": 2}, "trace: an open loop has no --concurrency"),
        ({"trace": "x", "sharegpt": "y"}, "sharegpt: not together with --trace"),
        ({"sharegpt": "y", "prefix_len": 3}, "prefix_len: prompts from a file"),
        ({"plot": "x.gif"}, "plot = x.gif: must end in .svg or .png"),
        ({"http": "host:80"}, "http = host:80: must begin with"),
        ({"time_scale": 0.0}, "time_scale = 0.0: must be positive"),
    ],
)
def test_flags_that_do_not_go_together_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeBenchConfig(**options)


def test_a_picture_is_drawn_beside_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.svg"
    measured(rates="100,200", plot=str(file))
    assert "<svg" in file.read_text()


def test_the_progress_line_tells_of_the_latest_requests() -> None:
    def record(index: int, ttft_s: float, error: str = "") -> Record:
        times = {"scheduled_s": 0.0, "sent_s": 0.0, "end_s": 2.0, "message_s": (ttft_s, 2.0)}
        return Record(index=index, num_input_tokens=1, num_output_tokens=11, max_tokens=11, error=error, **times)

    line = bench_serve.live_line([record(0, 1.0), record(1, 1.0), record(2, 0.5, "INTERNAL")], 4)
    assert line == "4 running, 1 failed, TTFT 1000 ms, TPOT 100 ms, 11 tokens/s"
    assert bench_serve.live_line([], 2) == "2 running"
