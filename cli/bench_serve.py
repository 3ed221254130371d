"""`kvrelay bench serve`: a load on a running router, and what it measured."""

import asyncio
import itertools
import math
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict

from tqdm import tqdm

from kvrelay.cli import bench_report as report
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_statistics import Limits, Record, summarise
from kvrelay.cli.bench_workload import Prompt, Workload, parse_lengths, poisson_arrivals
from kvrelay.cli.client import ModelView, Piece, RouterClient
from kvrelay.cli.load import Ask, Load, LoopTimer, within
from kvrelay.cli.main import ExitCode, exit_code
from kvrelay.engine.errors import RemoteError, Unavailable

RPC_TIMEOUT_S = 10.0
DEFAULT_NUM_PROMPTS = 100


def run(config: ServeBenchConfig) -> int:
    """Warm up, put the load on, show the figures.

    Returns: 0, or the exit code of the first request that failed. Raises: KvrelayError if nothing can be measured.
    """
    place = report.machine()
    model, records = asyncio.run(_measure(config))
    if not records:
        raise Unavailable(f"no request began within {config.duration_s} s")
    limits = Limits(ttft_ms=config.slo_ttft_ms, tpot_ms=config.slo_tpot_ms)
    summary = summarise(records, limits)
    figures = report.as_json(
        "bench serve",
        config,
        place,
        model=asdict(model),
        summary=asdict(summary),
        requests=[report.request_row(record) for record in sorted(records, key=lambda record: record.index)],
    )
    lines = [place.line(), _headline(config, model), "", *report.load_lines(summary, limits)]
    report.publish(lines, figures, config.json)
    for warning in report.warnings(summary):
        print(f"kvrelay bench serve: {warning}", file=sys.stderr)
    failed = [_error(record) for record in records if not record.succeeded]
    if not failed:
        return ExitCode.OK
    print(
        f"kvrelay bench serve: {len(failed)} of {len(records)} requests failed, the first: {failed[0]}", file=sys.stderr
    )
    return exit_code(failed[0])


async def _measure(config: ServeBenchConfig) -> tuple[ModelView, list[Record]]:
    async with RouterClient(config.router) as client:
        model = await client.model(timeout_s=RPC_TIMEOUT_S)
        return model, await measure(config, model, asker(client, config))


async def measure(config: ServeBenchConfig, model: ModelView, ask: Ask) -> list[Record]:
    """Warm up whatever answers, put the load on. Raises: KvrelayError if the warm-up fails."""
    workload = make_workload(config, model)
    warmup = Load(ask, workload.prompt, LoopTimer())
    await warmup.closed_loop(range(-config.warmup, 0), concurrency=1)
    for record in warmup.records:
        if not record.succeeded:
            raise _error(record)
    return await _put_on(config, ask, workload)


async def _put_on(config: ServeBenchConfig, ask: Ask, workload: Workload) -> list[Record]:
    duration_s = config.duration_s or math.inf
    num_prompts = config.num_prompts or (0 if config.duration_s else DEFAULT_NUM_PROMPTS)
    with tqdm(total=num_prompts or None, unit="request", disable=None, leave=False) as progress:  # None: off a terminal
        load = Load(ask, workload.prompt, LoopTimer(), on_end=progress.update)
        if config.rate:
            await load.open_loop(within(poisson_arrivals(config.rate, config.seed), num_prompts, duration_s))
        else:
            indices = range(num_prompts) if num_prompts else itertools.count()
            await load.closed_loop(indices, config.concurrency, duration_s)
    return load.records


def make_workload(config: ServeBenchConfig, model: ModelView) -> Workload:
    """The prompts for a model, of all tokens but EOS and BOS. Raises: ConfigError if they do not fit it."""
    special = {*model.eos_token_ids, model.bos_token_id}
    return Workload(
        seed=config.seed,
        vocabulary=[token_id for token_id in range(model.vocab_size) if token_id not in special],
        max_model_len=model.max_model_len,
        input_lengths=parse_lengths("input_len", config.input_len),
        output_lengths=parse_lengths("output_len", config.output_len),
        num_prefixes=config.num_prefixes,
        prefix_len=config.prefix_len,
    )


def _headline(config: ServeBenchConfig, model: ModelView) -> str:
    how = (
        f"open loop, {config.rate:g} arrivals a second" if config.rate else f"closed loop, {config.concurrency} at once"
    )
    prefix = f" behind one of {config.num_prefixes} prefixes of {config.prefix_len}" if config.prefix_len else ""
    return (
        f"{model.model} at {config.router}; {how}; tokens in {config.input_len}{prefix}, out {config.output_len};"
        f" seed {config.seed}"
    )


def _error(record: Record) -> RemoteError:
    return RemoteError(record.error, f"request {record.index}: {record.error_message}", record.retryable)


def asker(client: RouterClient, config: ServeBenchConfig) -> Ask:
    """How a router is asked for a prompt of this load."""
    salt = config.cache_salt or secrets.token_hex(8)

    def ask(prompt: Prompt) -> AsyncIterator[Piece]:
        return client.generate(
            prompt.token_ids,
            model=config.model,
            sampling={"max_tokens": prompt.max_tokens, "temperature": 0.0, "ignore_eos": config.ignore_eos},
            cache_salt=salt,
            timeout_s=config.timeout_s,
        )

    return ask
