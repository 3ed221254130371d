"""A benchmark's figures as lines for a person, and as JSON. Pure, but for `machine` and `publish`."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrelay import __version__
from kvrelay.cli.bench_statistics import Limits, LoadSummary, Record, Summary
from kvrelay.engine.errors import ConfigError

MAX_LATENESS_MS = 5.0  # of the client's own sends, beyond which the figures say as much of it as of the server
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a benchmark runs, and how busy it is there."""

    cpu: str
    num_cores: int  # that this process may use
    python: str
    load_average_1min: float

    def line(self) -> str:
        return (
            f"{self.cpu}, {self.num_cores} cores, Python {self.python},"
            f" load average before {self.load_average_1min:.1f}"
        )


def load_lines(summary: LoadSummary, limits: Limits) -> list[str]:
    """A load's figures as a table."""
    distributions = {
        "time to first token, ms": summary.ttft_ms,
        "time per output token, ms": summary.tpot_ms,
        "inter-token gap, ms": summary.itl_ms,
        "end to end, ms": summary.end_to_end_ms,
        "sent late, ms": summary.lateness_ms,
    }
    rows = [["", *_COLUMNS], *([name, *_cells(found)] for name, found in distributions.items())]
    return [*align(rows), "", *align(_totals(summary, limits), "<<")]


def warnings(summary: LoadSummary) -> list[str]:
    """What a reader of the figures must know."""
    late = summary.lateness_ms
    if not late or late.p99 <= MAX_LATENESS_MS:
        return []
    return [
        f"the load itself ran late: 1 request in 100 was sent {late.p99:.1f} ms or more after its time, the latest"
        f" {late.max:.1f} ms; the figures count that in"
    ]


def align(rows: Sequence[Sequence[str]], sides: str = "<") -> list[str]:
    """Rows as lines, each column as wide as its widest cell. `sides`: < or > a column, > for those beyond its end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, _sides(sides), widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def as_json(command: str, config: Any, place: Machine, **more: Any) -> dict[str, Any]:
    """A benchmark's JSON: what was run, where and when, and what came of it."""
    return {
        "command": command,
        "version": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": asdict(place),
        "config": asdict(config),
        **more,
    }


def request_row(record: Record) -> dict[str, Any]:
    """One request's own figures."""
    derived = {
        "lateness_s": record.lateness_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "end_to_end_s": record.end_to_end_s,
    }
    return asdict(record) | derived


def publish(lines: Iterable[str], figures: Mapping[str, Any], json_file: str) -> None:
    """Print the table, and write the JSON to a file or standard output, where one is asked for.

    Raises: ConfigError if it cannot be written; the table is printed by then.
    """
    print(*lines, sep="\n", file=sys.stderr if json_file == "-" else sys.stdout, flush=True)
    if json_file == "-":
        print(json.dumps(figures), flush=True)
    elif json_file:
        try:
            Path(json_file).write_text(json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"json = {json_file}: {error.strerror}") from error


def machine() -> Machine:
    """This machine now: to be asked before a benchmark adds to its load."""
    return Machine(
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        load_average_1min=os.getloadavg()[0],
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cells(found: Summary | None) -> list[str]:
    return [f"{getattr(found, column):,.1f}" if found else "-" for column in _COLUMNS]


def _sides(sides: str) -> Iterable[str]:
    yield from sides
    while True:
        yield ">"


def _totals(summary: LoadSummary, limits: Limits) -> list[list[str]]:
    failed = "".join(f", {count} {code}" for code, count in summary.errors.items())
    rows = [
        ["requests", f"{summary.num_requests} in {summary.duration_s:.1f} s, {summary.num_failed} failed{failed}"],
        ["requests/s", f"{summary.requests_per_s:.2f}"],
        ["tokens/s", f"{summary.input_tokens_per_s:,.1f} in, {summary.output_tokens_per_s:,.1f} out"],
        ["tokens", f"{summary.num_input_tokens:,} in, {summary.num_output_tokens:,} out"],
        ["cached", f"{summary.num_cached_tokens:,} of the tokens in"],
    ]
    if summary.tokens_per_message:
        rows.append(["tokens a message", f"{summary.tokens_per_message:.2f}"])
    if summary.goodput:
        named = {"TTFT": limits.ttft_ms, "TPOT": limits.tpot_ms}
        within = " and ".join(f"{name} {limit:g} ms" for name, limit in named.items() if limit is not None)
        good = f"{summary.goodput.requests_per_s:.2f} requests/s, {summary.goodput.share:.1%} within {within}"
        rows.append(["goodput", good])
    if summary.timings:
        parts = ("route", "prefill_queue", "prefill", "first_token_out", "exposed_transfer", "decode_queue")
        shown = ", ".join(f"{part.replace('_', ' ')} {summary.timings[f'{part}_ms']:.1f}" for part in parts)
        rows.append(["medians, ms", shown])
    if summary.handoff:
        moved = (
            f"{summary.handoff['kv_bytes']:,.0f} bytes, landed {summary.handoff['transfer_ms']:.1f} ms after the grant"
        )
        rows.append(["hand-off, medians", moved])
    return rows
