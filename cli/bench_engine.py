"""`kvrelay bench engine`: the engine alone, in this process."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

from tqdm import tqdm

from kvrelay.cli import bench_report as report
from kvrelay.cli.config import EngineBenchConfig
from kvrelay.cli.main import ExitCode

if TYPE_CHECKING:
    from kvrelay.engine.bench import Measurement, Setup


def run(config: EngineBenchConfig) -> int:
    """Measure, and show the figures. Returns: the exit code. Raises: KvrelayError."""
    from kvrelay.engine import bench

    plan = bench.BenchPlan(
        batch_sizes=config.batch_sizes,
        contexts=config.contexts,
        decode_steps=config.decode_steps,
        prompt_lens=config.prompt_lens,
        repeats=config.repeats,
        seed=config.seed,
    )
    place = report.machine()
    with tqdm(total=plan.num_shapes, unit="shape", disable=None, leave=False) as progress:  # None: off a terminal

        def on_measured(name: str) -> None:
            progress.set_postfix_str(name, refresh=False)
            progress.update()

        setup, measured = bench.run(config, plan, on_measured)
    figures = report.as_json(
        "bench engine",
        config,
        place,
        setup=asdict(setup),
        measurements=[asdict(measurement) for measurement in measured],
    )
    report.publish([place.line(), setup_line(setup), "", *table(measured)], figures, config.json)
    return ExitCode.OK


def setup_line(setup: "Setup") -> str:
    """What computed, in one line."""
    threads = f"{setup.num_threads} thread{'' if setup.num_threads == 1 else 's'}"
    return f"{setup.model} ({setup.architecture}), {setup.dtype}, {threads}, torch {setup.torch}, {setup.kernels}"


def table(measured: "Sequence[Measurement]") -> list[str]:
    """The medians of the repeats, and how far they spread."""
    rows = [["", "batch", "tokens of each", "tokens/s", "min - max", "step, ms"]]
    for measurement in measured:
        rates = [run.tokens_per_s for run in measurement.runs]
        first, last = (median(getattr(run, name) for run in measurement.runs) for name in ("first_len", "last_len"))
        rows.append(
            [
                measurement.kind,
                str(measurement.batch_size),
                f"{first:,.0f} - {last:,.0f}",
                f"{median(rates):,.1f}",
                f"{min(rates):,.1f} - {max(rates):,.1f}",
                f"{median(run.step_ms for run in measurement.runs):,.1f}",
            ]
        )
    return report.align(rows)
