"""Pictures of what `kvrelay bench serve` measured, from its JSON alone: `kvrelay bench plot` draws an old one again.

Distributions are cumulative: a percentile is read off the axis, and no choice of bins hides a tail.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cli.config import PlotBenchConfig
from kvrelay.cli.main import ExitCode
from kvrelay.engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ONE_COLOUR = "#2a6fbb"
_INK, _GRID = "#333333", "#dddddd"
_MARKS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """What the picture needs of one load."""

    name: str
    rate: float | None
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    requests_per_s: float  # that succeeded
    good_per_s: float | None  # within the limits; None without any


def run(config: PlotBenchConfig) -> int:
    """Draw figures that were kept. Raises: ConfigError if the file has none."""
    check()
    try:
        figures = json.loads(Path(config.figures).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{config.figures}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{config.figures}: not JSON: {error}") from error
    draw(figures, config.picture)
    return ExitCode.OK


def check() -> None:
    """Raises: ConfigError without matplotlib."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'kvrelay[bench]'") from None


def runs_of(figures: Any) -> list[PlottedRun]:
    """Pure. Raises: ConfigError if these are not the figures of `bench serve`."""
    try:
        rows = figures.get("runs") or [{"rate": None, **{name: figures[name] for name in ("summary", "requests")}}]
        return [_plotted(row) for row in rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"no figures of bench serve: {error!r}") from error


def draw(figures: Mapping[str, Any], file: str) -> None:
    """Write the picture. Raises: ConfigError."""
    picture = _figure(figures)
    try:
        # No date: the same figures give the same file.
        picture.savefig(file, dpi=150, metadata={"Date": None} if file.endswith(".svg") else None)
    except OSError as error:
        raise ConfigError(f"plot = {file}: {error.strerror}") from error


def _figure(figures: Mapping[str, Any]) -> "Figure":
    from matplotlib.figure import Figure

    runs = runs_of(figures)
    is_sweep = runs[0].rate is not None
    num_panels = 3 if is_sweep else 2
    picture = Figure(figsize=(4.6 * num_panels, 3.6), layout="constrained", facecolor="white")
    panels: Sequence[Axes] = picture.subplots(1, num_panels)
    colours = list(_colours(len(runs)))
    _distributions(panels[0], "Time to first token", [(one.name, one.ttft_ms) for one in runs], colours)
    _distributions(panels[1], "Gap between messages", [(one.name, one.itl_ms) for one in runs], colours)
    if is_sweep:
        _goodput(panels[2], runs, figures.get("config", {}))
    picture.suptitle(_title(figures), fontsize=10, color=_INK)
    return picture


def _distributions(
    panel: "Axes", title: str, drawn: Sequence[tuple[str, tuple[float, ...]]], colours: Sequence[str]
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for (name, values), colour in zip(drawn, colours, strict=True):
        if values:
            panel.ecdf(values, color=colour, linewidth=1.6, label=name)
    _style(panel, title, "ms", "share of them within")
    if any(value > 0 for _, values in drawn for value in values):
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(0, 1.02)
    panel.set_yticks([0, *_MARKS, 1], ["0", *(f"p{mark * 100:g}" for mark in _MARKS), ""])
    if len(drawn) > 1:
        panel.legend(frameon=False, fontsize=8, loc="lower right")


def _goodput(panel: "Axes", runs: Sequence[PlottedRun], config: Mapping[str, Any]) -> None:
    rates = [one.rate or 0.0 for one in runs]
    panel.plot(rates, rates, color=_GRID, linewidth=1.6, linestyle="--", label="asked for")
    panel.plot(rates, [one.requests_per_s for one in runs], color="#999999", marker="o", markersize=4, label="answered")
    good = [(rate, one.good_per_s) for rate, one in zip(rates, runs, strict=True) if one.good_per_s is not None]
    limits = ", ".join(
        f"{name} {config[key]:g} ms"
        for name, key in (("TTFT", "slo_ttft_ms"), ("TPOT", "slo_tpot_ms"))
        if config.get(key) is not None
    )
    if good:
        label = f"within {limits}" if limits else "within the limits"
        panel.plot(*zip(*good, strict=True), color=_ONE_COLOUR, marker="o", markersize=5, linewidth=2, label=label)
    _style(panel, "Goodput over rate" if good else "Answered over rate", "requests a second, asked for", "a second")
    panel.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    panel.legend(frameon=False, fontsize=8, loc="upper left")


def _style(panel: "Axes", title: str, x_label: str, y_label: str) -> None:
    panel.set_title(title, fontsize=10, loc="left", color=_INK)
    panel.set_xlabel(x_label, fontsize=9, color=_INK)
    panel.set_ylabel(y_label, fontsize=9, color=_INK)
    panel.tick_params(labelsize=8, colors=_INK)
    panel.grid(color=_GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _colours(count: int) -> Iterator[str]:
    """One hue, darker with the rate: the runs have an order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count == 1:
        yield _ONE_COLOUR
        return
    shades = colormaps["viridis_r"]
    for i in range(count):
        yield to_hex(shades(0.15 + 0.8 * i / (count - 1)))


def _plotted(row: Mapping[str, Any]) -> PlottedRun:
    requests = [request for request in row["requests"] if not request["error"]]
    times = [request["message_s"] for request in requests]
    summary, rate = row["summary"], row["rate"]
    goodput = summary["goodput"]
    return PlottedRun(
        name="all" if rate is None else f"{rate:g}/s",
        rate=rate,
        ttft_ms=tuple(request["ttft_s"] * 1e3 for request in requests if request["ttft_s"] is not None),
        itl_ms=tuple((b - a) * 1e3 for moments in times for a, b in itertools.pairwise(moments)),
        requests_per_s=float(summary["requests_per_s"]),
        good_per_s=float(goodput["requests_per_s"]) if goodput else None,
    )


def _title(figures: Mapping[str, Any]) -> str:
    config, model = figures.get("config", {}), figures.get("model", {})
    tokens = f"tokens in {config.get('input_len')}, out {config.get('output_len')}"
    asked = config.get("trace") or config.get("sharegpt") or tokens
    return f"{model.get('model', '')} at {config.get('http') or config.get('router')}; {asked}"
