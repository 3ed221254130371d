"""Where a prefill node beside the decode node wins, and where not: `kvrelay up` against one node that does both.

    .venv/bin/pip install -e '.[bench]'
    .venv/bin/python bench/disaggregation.py --picture docs/disaggregation.svg --json figures.json

All arrangements are up all the time, on the same cores, and one of them gets a load of `kvrelay bench serve`: each in
turn, at each rate. Run it with nothing beside it. `--draw figures.json` draws a picture anew without measuring.

Goodput: requests a second that had their first token and their other tokens in time (`--slo-ttft-ms`, `--slo-tpot-ms`).
"""

import asyncio
import json
import os
import secrets
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import tyro
from peers import peers

from kvrelay.cli import bench_report as report, bench_serve
from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_statistics import Limits, summarise, summarise_ms
from kvrelay.cli.client import RouterClient

# Flags of `kvrelay up`, by what the picture calls them. The second computes prompts in steps as large as the first's,
# the third in small ones, between which others get a token.
ARRANGEMENTS = {
    "a prefill and a decode node": "",
    "one node": "--prefill 0",
    "one node, chunks of 128": "--prefill 0 --max-num-batched-tokens 128",
}
COLOURS = ("#1f77b4", "#d62728", "#ff9896")
MARKERS = ("o", "s", "^")


@dataclass(frozen=True, kw_only=True)
class Options:
    rates: tuple[float, ...] = (0.8, 1.6, 2.4, 3.2, 4.0)
    """Arrivals a second."""
    num_prompts: int = 40
    """Requests of each pass."""
    input_len: str = "512"
    """Prompt tokens, as `kvrelay bench serve` takes them."""
    output_len: str = "64"
    """Tokens to generate, likewise."""
    repeats: int = 1
    """Passes of each rate on each arrangement; their gaps are put together, of other figures the median is taken."""
    slo_ttft_ms: float = 1000.0
    """Limit for goodput: time to the first token."""
    slo_tpot_ms: float = 40.0
    """Limit for goodput: mean time per token after the first."""
    picture: str = ""
    """File for the picture, such as docs/disaggregation.svg."""
    json: str = ""
    """File for all figures."""
    draw: str = ""
    """A file that `--json` wrote: draw it, and measure nothing."""


async def measure(options: Options, routers: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each rate and arrangement."""
    rows = []
    limits = Limits(ttft_ms=options.slo_ttft_ms, tpot_ms=options.slo_tpot_ms)
    for rate in options.rates:
        passes: dict[str, list[dict[str, Any]]] = {name: [] for name in routers}
        gaps: dict[str, list[float]] = {name: [] for name in routers}
        for i in range(options.repeats):
            for name, router in routers.items():
                config = ServeBenchConfig(
                    rate=rate,
                    num_prompts=options.num_prompts,
                    input_len=options.input_len,
                    output_len=options.output_len,
                    seed=i,
                    cache_salt=secrets.token_hex(8),
                )
                async with RouterClient(router) as client:
                    model = await client.model(timeout_s=bench_serve.RPC_TIMEOUT_S)
                    records = await bench_serve.measure(config, model, bench_serve.asker(client, config))
                gaps[name] += [gap for record in records for gap in record.gaps_s]
                passes[name].append(asdict(summarise(records, limits)))
                print(f"{rate:g} a second, {name}: done", file=sys.stderr)
        rows += [{"rate": rate, "name": name} | _figures(passes[name], gaps[name]) for name in routers]
    return rows


def _figures(passes: list[dict[str, Any]], gaps: list[float]) -> dict[str, Any]:
    def middle(name: str, part: str) -> float:
        return median(found[name][part] for found in passes)

    itl = summarise_ms(gaps)
    assert itl is not None
    return {
        "ttft_p50_ms": middle("ttft_ms", "p50"),
        "ttft_p99_ms": middle("ttft_ms", "p99"),
        "tpot_p50_ms": middle("tpot_ms", "p50"),
        "itl_p50_ms": itl.p50,
        "itl_p99_ms": itl.p99,
        "itl_max_ms": itl.max,
        "goodput": middle("goodput", "requests_per_s"),
        "output_tokens_per_s": median(found["output_tokens_per_s"] for found in passes),
        "num_failed": sum(found["num_failed"] for found in passes),
        "gaps_ms": sorted(round(gap * 1e3, 2) for gap in gaps),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "TTFT p50": "ttft_p50_ms",
        "TTFT p99": "ttft_p99_ms",
        "TPOT p50": "tpot_p50_ms",
        "ITL p99": "itl_p99_ms",
        "ITL max": "itl_max_ms",
    }
    lines = [["a second", "", *(f"{title}, ms" for title in columns), "goodput/s", "failed"]]
    for row in rows:
        times = [f"{row[name]:,.0f}" for name in columns.values()]
        lines.append([f"{row['rate']:g}", row["name"], *times, f"{row['goodput']:.2f}", str(row["num_failed"])])
    return report.align(lines, "<<")


def draw(figures: dict[str, Any], file: str) -> None:
    """Four panels over the arrival rate, and how the gaps are distributed at the middle one."""
    rows, config = figures["rows"], figures["config"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    rates = sorted({row["rate"] for row in rows})
    middle = rates[len(rates) // 2]
    panels = {
        "median time to first token, ms": "ttft_p50_ms",
        "median time per output token, ms": "tpot_p50_ms",
        "gap between tokens, 99th percentile, ms": "itl_p99_ms",
    }
    plt.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "kvrelay", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        mine = [row for row in rows if row["name"] == name]
        style = {"color": colour, "marker": marker, "markersize": 4}
        for axis, column in zip(axes.flat, panels.values(), strict=False):
            axis.plot(rates, [row[column] for row in mine], label=name, **style)
        axes.flat[3].plot(rates, [row["goodput"] for row in mine], **style)
        for axis, rate in ((axes.flat[4], rates[0]), (axes.flat[5], middle)):
            gaps = next(row["gaps_ms"] for row in mine if row["rate"] == rate)
            beyond = [1 - i / len(gaps) for i in range(len(gaps))]
            axis.plot(gaps, beyond, color=colour)
            axis.set(
                xscale="log", yscale="log", xlim=(1, None), title=f"share of gaps longer than, ms: {rate:g} a second"
            )
    for axis, title in zip(axes.flat, panels, strict=False):
        axis.set(title=title, ylim=(0, None))
    axes.flat[3].plot(rates, rates, color="grey", linestyle=":", label="all that arrive")
    axes.flat[3].set(
        title=f"requests/s within TTFT {config['slo_ttft_ms']:g} ms, TPOT {config['slo_tpot_ms']:g} ms",
        ylim=(0, None),
    )
    axes.flat[3].legend(frameon=False)
    axes.flat[0].legend(frameon=False)
    for axis in axes.flat[:4]:
        axis.set_xlabel("arrivals a second")
        axis.grid(alpha=0.3)
    machine = figures["machine"]
    figure.suptitle(
        f"SmolLM2-135M, {config['input_len']} tokens in, {config['output_len']} out; {machine['num_cores']} cores,"
        f" {machine['cpu']}"
    )
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.draw:
        figures = json.loads(Path(options.draw).read_text())
        draw(figures, options.picture)
        return
    peers.end_cleanly_on_sigterm()
    place = report.machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        routers = {}
        for i, (name, flags) in enumerate(ARRANGEMENTS.items()):
            (folder / str(i)).mkdir()
            side = peers.kvrelay(folder / str(i))
            routers[name] = stack.enter_context(peers.kvrelay_up(side, shlex.split(flags)))
        rows = asyncio.run(measure(options, routers))
    figures = report.as_json("bench/disaggregation.py", options, place, rows=rows)
    report.publish(
        [place.line(), f"{len(os.sched_getaffinity(0))} cores for all", "", *table(rows)], figures, options.json
    )
    if options.picture:
        draw(figures, options.picture)


if __name__ == "__main__":
    main()
