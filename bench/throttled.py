"""A long prompt's KV over slow links: from the call on P to landed on D, beside what computing and sending take alone.

    .venv/bin/python bench/throttled.py [--mb-per-s 100 15] [--prompt-len 8000] [--transport zmq]

Aim: no more than the larger of the two, and 10 %. Computing is that of the same run; sending is the prompt's bytes over
the link's rate. P is a process of its own, D and the link (a proxy on loopback, `bench/proxy.py`, for data; control
goes beside it) are this one. With 0 the link is as fast as loopback.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import tyro
from proxy import Link, Proxy

from kvrelay.cli import bench_report as report
from kvrelay.connector.receiver import Receiver
from kvrelay.engine.config import EngineConfig
from kvrelay.prefill_node import bench


@dataclass(frozen=True, kw_only=True)
class Options(EngineConfig):
    mb_per_s: tuple[float, ...] = (0.0, 100.0, 15.0)
    """Rates of the link, in megabytes (10^6) a second."""
    delay_ms: float = 0.0
    """Of the link, one way."""
    prompt_len: int = 8000
    """Tokens."""
    chunk: int = 512
    """Tokens of a step."""
    prompts: int = 1
    """Prompts at each rate."""
    transport: str = "zmq"
    """One whose data connection is TCP: zmq, tcp."""
    json: str = ""
    """File for all figures."""


def measure(options: Options, mb_per_s: float) -> bench.PrefillFigures:
    """Prompts over a link of this rate."""
    with ExitStack() as stack:

        def reach(receiver: Receiver) -> str:
            """Put the link before each data address that D offers."""
            for reader in receiver._readers.values():
                host, _, port = reader.endpoint.address.rpartition(":")
                forth = Link(mb_per_s * 1e6, options.delay_ms / 1e3)
                proxy = Proxy((host, int(port)), forth=forth, back=Link(delay_s=options.delay_ms / 1e3))
                stack.callback(proxy.close)
                reader.endpoint = replace(reader.endpoint, address=proxy.address)  # type: ignore[misc]
            return receiver.address()

        return bench.run(options, options.transport, options.prompt_len, options.chunk, options.prompts, reach)


def row(mb_per_s: float, found: bench.PrefillFigures) -> dict[str, Any]:
    compute_s, total_s = median(found.prefill_ms) / 1e3, median(found.end_to_end_ms) / 1e3
    send_s = found.num_bytes / (mb_per_s * 1e6) if mb_per_s else 0.0
    return {
        "mb_per_s": mb_per_s,
        "num_bytes": found.num_bytes,
        "compute_s": compute_s,
        "send_s": send_s,
        "end_to_end_s": total_s,
        "of_the_larger": total_s / max(compute_s, send_s),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [["MB/s", "MB", "computing, s", "sending, s", "end to end, s", "of the larger"]]
    for found in rows:
        seconds = [f"{found[name]:.2f}" for name in ("compute_s", "send_s", "end_to_end_s", "of_the_larger")]
        lines.append(
            [f"{found['mb_per_s']:g}" if found["mb_per_s"] else "-", f"{found['num_bytes'] / 1e6:.0f}", *seconds]
        )
    return report.align(lines, ">")


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    place = report.machine()
    measured = [(rate, measure(options, rate)) for rate in options.mb_per_s]
    rows = [row(rate, found) for rate, found in measured]
    figures = report.as_json(
        "bench/throttled.py", options, place, rows=rows, runs=[asdict(found) for _, found in measured]
    )
    report.publish([place.line(), "", *table(rows)], figures, options.json)


if __name__ == "__main__":
    main()
