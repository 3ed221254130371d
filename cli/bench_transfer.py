"""`kvrelay bench transfer`: KV between two processes of this machine, beside what bounds it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from kvrelay.cli import bench_report as report
from kvrelay.cli.bench_statistics import percentile
from kvrelay.cli.config import TransferBenchConfig
from kvrelay.cli.main import ExitCode
from kvrelay.engine.config import parse_size

if TYPE_CHECKING:
    from kvrelay.connector.bench import Figures

_LIMITS = ("memcpy", "tcp socket")


def run(config: TransferBenchConfig) -> int:
    """Measure, and show the figures. Returns: the exit code. Raises: KvrelayError."""
    place = report.machine()
    more: dict[str, Any] = {}
    lines = _prefill(config, more) if config.prefill else _transfer(config, more)
    figures = report.as_json("bench transfer", config, place, **more)
    report.publish([place.line(), *lines], figures, config.json)
    return ExitCode.OK


def _transfer(config: TransferBenchConfig, more: dict[str, Any]) -> list[str]:
    from kvrelay.connector import bench

    plan = bench.TransferPlan(
        transports=config.named_transports(),
        size_bytes=parse_size(config.size),
        block_bytes=tuple(parse_size(size) for size in config.blocks),
        repeats=config.repeats,
        fixed_transfers=config.fixed_transfers,
        is_loaded=config.loaded,
        peers=config.named_peers(),
    )
    with tqdm(unit="pass", disable=None, leave=False) as progress:  # None: off a terminal

        def on_measured(name: str) -> None:
            progress.set_postfix_str(name, refresh=False)
            progress.update()

        found, left_out = bench.run(plan, on_measured)
    more |= {"figures": [asdict(figures) for figures in found], "left_out": left_out}
    return [*table(found), *(f"left out: {name}: {reason}" for name, reason in left_out.items())]


def _prefill(config: TransferBenchConfig, more: dict[str, Any]) -> list[str]:
    from kvrelay.prefill_node import bench

    rows = []
    with bench.busy_loops(2 if config.loaded else 0):
        for transport in config.named_transports():
            if transport == "inproc":
                continue
            found = bench.run(config, transport, config.prefill, config.chunk, config.prompts)
            rows.append((transport, found))
    more["prefill"] = [{"transport": name} | asdict(found) for name, found in rows]
    return ["", *prefill_table([(name, found.exposed_ms, found.hidden_ms, found.prefill_ms) for name, found in rows])]


def table(found: "Sequence[Figures]") -> list[str]:
    """Throughput, its share of two limits, CPU time, and the fixed costs; medians, and how far they spread."""
    cases = list(dict.fromkeys(figures.case for figures in found))
    names = list(dict.fromkeys(figures.contender for figures in found))
    by_place = {(figures.contender, figures.case): figures for figures in found}

    def rows(title: str, cell: "Any", only: Iterable[str] = names) -> list[str]:
        head = [title, *cases]
        body = [[name, *(cell(by_place[name, case]) for case in cases)] for name in only]
        return ["", *report.align([head, *body])]

    def share(limit: str) -> "Any":
        return lambda f: f"{median(f.gb_per_s) / median(by_place[limit, f.case].gb_per_s):.2f}"

    ours = [name for name in names if by_place[name, cases[0]].kind != "limit"]
    lines = rows("GB/s", lambda f: spread(f.gb_per_s))
    for limit in _LIMITS:
        if limit in names:
            lines += rows(f"of {limit}", share(limit), ours)
    lines += rows("CPU s/GB, both sides", lambda f: spread(f.cpu_s_per_gb))
    lines += rows("one block, us, p50/p99", lambda f: tail(f.one_block_us))
    transports = [name for name in names if by_place[name, cases[0]].kind == "transport"]
    return lines + rows("no block, us, p50/p99", lambda f: tail(f.zero_block_us), transports)


def prefill_table(rows: "Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[float]]]") -> list[str]:
    """The parts of each transfer that the request waited for, and that it did not."""
    lines = [["", "prompts", "exposed, ms, p50/p99", "hidden, ms, p50/p99", "prefill, ms, p50/p99"]]
    lines += [[name, str(len(parts[0])), *(tail(part, 1) for part in parts)] for name, *parts in rows]
    return report.align(lines)


def spread(values: Sequence[float]) -> str:
    """The median, and the range."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"


def tail(values: Sequence[float], digits: int = 0) -> str:
    """The median and the 99th percentile."""
    return f"{median(values):,.{digits}f} / {percentile(sorted(values), 0.99):,.{digits}f}" if values else "-"
