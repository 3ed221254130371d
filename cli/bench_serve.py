"""`kvrelay bench serve`: a load on a running server, and what it measured."""

import asyncio
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from kvrelay.cli import bench_report as report
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_prompts import Load as Asked, prepare
from kvrelay.cli.bench_server import RPC_TIMEOUT_S, asker, server_of
from kvrelay.cli.bench_statistics import Limits, Record, percentile, summarise
from kvrelay.cli.bench_workload import poisson_arrivals
from kvrelay.cli.client import ModelView
from kvrelay.cli.load import Ask, Load, LoopTimer, within
from kvrelay.cli.main import ExitCode, exit_code
from kvrelay.engine.errors import RemoteError, Unavailable

__all__ = ["RPC_TIMEOUT_S", "asker", "measure", "run"]

DEFAULT_NUM_PROMPTS = 100


@dataclass(frozen=True, slots=True)
class Run:
    """One load that was put on; `rate` of an open loop that the flags gave one."""

    rate: float | None
    records: list[Record]


def run(config: ServeBenchConfig) -> int:
    """Warm up, put the load on, show the figures; with --rates one load after the other.

    Returns: 0, or the exit code of the first request that failed. Raises: KvrelayError if nothing can be measured.
    """
    if config.plot:
        from kvrelay.cli.bench_plot import check

        check()  # before the time is spent
    place = report.machine()
    model, asked, runs = asyncio.run(_measure(config))
    limits = Limits(ttft_ms=config.slo_ttft_ms, tpot_ms=config.slo_tpot_ms)
    lines, rows = [place.line(), _headline(config, model)], []
    for one in runs:
        if not one.records:
            raise Unavailable(f"no request began within {config.duration_s} s")
        summary = summarise(one.records, limits)
        ordered = sorted(one.records, key=lambda record: record.index)
        requests = [report.request_row(record) for record in ordered]
        rows.append({"rate": one.rate, "summary": asdict(summary), "requests": requests})
        lines += [
            "",
            *([f"{one.rate:g} arrivals a second"] if config.rates else []),
            *report.load_lines(summary, limits),
        ]
        for warning in (*asked.warnings, *report.warnings(summary)):
            print(f"kvrelay bench serve: {warning}", file=sys.stderr)
    more: dict[str, Any] = {"runs": rows} if config.rates else {name: rows[0][name] for name in ("summary", "requests")}
    figures = report.as_json("bench serve", config, place, model=asdict(model), **more)
    report.publish(lines, figures, config.json)
    if config.plot:
        from kvrelay.cli.bench_plot import draw

        draw(figures, config.plot)
    return _verdict([record for one in runs for record in one.records])


def _verdict(records: list[Record]) -> int:
    failed = [_error(record) for record in records if not record.succeeded]
    if not failed:
        return ExitCode.OK
    print(
        f"kvrelay bench serve: {len(failed)} of {len(records)} requests failed, the first: {failed[0]}", file=sys.stderr
    )
    return exit_code(failed[0])


async def _measure(config: ServeBenchConfig) -> tuple[ModelView, Asked, list[Run]]:
    async with server_of(config) as server:
        model = await server.model()
        asked = await prepare(config, model, server.vocabulary(model), server.tokenize)
        runs = []
        for rate in config.sweep() or (config.rate or None,):
            ask = server.asker()
            await _warm_up(config, ask, asked)
            runs.append(Run(rate, await _put_on(config, ask, asked, rate)))
        return model, asked, runs


async def measure(config: ServeBenchConfig, model: ModelView, ask: Ask) -> list[Record]:
    """Warm up whatever answers, put the load on: random prompts. Raises: KvrelayError if the warm-up fails."""
    special = {*model.eos_token_ids, model.bos_token_id}
    vocabulary = [token_id for token_id in range(model.vocab_size) if token_id not in special]
    asked = await prepare(config, model, vocabulary)
    await _warm_up(config, ask, asked)
    return await _put_on(config, ask, asked, config.rate or None)


async def _warm_up(config: ServeBenchConfig, ask: Ask, asked: Asked) -> None:
    warmup = Load(ask, asked.source.prompt, LoopTimer())
    await warmup.closed_loop(range(-config.warmup, 0), concurrency=1)
    for record in warmup.records:
        if not record.succeeded:
            raise _error(record)


async def _put_on(config: ServeBenchConfig, ask: Ask, asked: Asked, rate: float | None) -> list[Record]:
    duration_s = config.duration_s or math.inf
    num_prompts = config.num_prompts or (0 if config.duration_s or config.trace else DEFAULT_NUM_PROMPTS)
    if asked.source.num_prompts is not None:
        num_prompts = min(num_prompts or asked.source.num_prompts, asked.source.num_prompts)
    name = f"{rate:g}/s" if rate else None
    # disable=None: nothing is shown where standard error is no terminal.
    with tqdm(total=num_prompts or None, unit="request", desc=name, disable=None, leave=False) as progress:
        load = Load(ask, asked.source.prompt, LoopTimer(), on_end=lambda: _show(progress, load))
        arrivals = _arrivals(config, asked, rate)
        if arrivals is not None:
            await load.open_loop(within(arrivals, num_prompts, duration_s))
        else:
            indices: Iterable[int] = range(num_prompts) if num_prompts else itertools.count()
            await load.closed_loop(indices, config.concurrency, duration_s)
    return load.records


def _arrivals(config: ServeBenchConfig, asked: Asked, rate: float | None) -> Iterator[float] | None:
    """None: a closed loop."""
    if asked.arrivals_s is not None:
        return (arrival_s * config.time_scale for arrival_s in asked.arrivals_s)
    return poisson_arrivals(rate, config.seed) if rate else None


def _show(progress: "tqdm[Any]", load: Load) -> None:
    """One more request has ended."""
    if not progress.disable:
        progress.set_postfix_str(live_line(load.records, load.num_running), refresh=False)
    progress.update()


def live_line(records: list[Record], num_running: int) -> str:
    """What a load looks like while it goes on: times and rates of the latest requests."""
    latest = [record for record in records[-64:] if record.succeeded]
    num_failed = sum(not record.succeeded for record in records)
    parts = [f"{num_running} running"] + ([f"{num_failed} failed"] if num_failed else [])
    taken: dict[str, Callable[[Record], float | None]] = {"TTFT": lambda r: r.ttft_s, "TPOT": lambda r: r.tpot_s}
    for name, of in taken.items():
        values = sorted(value for value in map(of, latest) if value is not None)
        if values:
            parts.append(f"{name} {percentile(values, 0.5) * 1e3:.0f} ms")
    if latest:
        span_s = max(record.end_s for record in latest) - min(record.sent_s for record in latest)
        parts.append(f"{sum(record.num_output_tokens for record in latest) / max(span_s, 1e-9):.0f} tokens/s")
    return ", ".join(parts)


def _headline(config: ServeBenchConfig, model: ModelView) -> str:
    where = config.http or config.router
    how = (
        f"open loop, {config.rate:g} arrivals a second" if config.rate else f"closed loop, {config.concurrency} at once"
    )
    if config.rates:
        how = f"open loops, {config.rates} arrivals a second"
    if config.trace:
        how = f"arrivals of {config.trace}, times {config.time_scale:g}"
    prefix = f" behind one of {config.num_prefixes} prefixes of {config.prefix_len}" if config.prefix_len else ""
    tokens = f"tokens in {config.input_len}{prefix}, out {config.output_len}"
    if config.sharegpt or config.trace:
        tokens = f"prompts of {config.sharegpt}" if config.sharegpt else "its lengths"
    return f"{model.model} at {where}; {how}; {tokens}; seed {config.seed}"


def _error(record: Record) -> RemoteError:
    return RemoteError(record.error, f"request {record.index}: {record.error_message}", record.retryable)
