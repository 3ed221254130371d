"""Pictures of a load's figures."""

import builtins
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli import bench_plot
from kvrelay.cli.main import ExitCode, main
from kvrelay.engine.errors import ConfigError

pytest.importorskip("matplotlib")


def row(rate: float | None, good: float | None = None) -> dict[str, Any]:
    request = {"error": "", "ttft_s": 0.25, "message_s": [0.25, 0.5, 1.5]}
    failed = {"error": "INTERNAL", "ttft_s": 9.0, "message_s": [9.0, 19.0]}
    goodput = None if good is None else {"requests_per_s": good}
    return {"rate": rate, "summary": {"requests_per_s": 0.75, "goodput": goodput}, "requests": [request, failed]}


SINGLE = {name: row(None)[name] for name in ("summary", "requests")} | {"config": {"input_len": "9"}}
SWEEP = {"runs": [row(1.0, 0.5), row(2.0, 0.25)], "config": {"slo_ttft_ms": 300.0}, "model": {"model": "fake"}}


def test_what_is_drawn_is_of_the_requests_that_succeeded() -> None:
    (one,) = bench_plot.runs_of(SINGLE)
    assert (one.ttft_ms, one.itl_ms, one.good_per_s) == ((250.0,), (250.0, 1000.0), None)
    first, second = bench_plot.runs_of(SWEEP)
    assert (first.name, first.rate, second.good_per_s) == ("1/s", 1.0, 0.25)


def lines(figures: Mapping[str, Any], panel: int) -> dict[str, tuple[list[float], list[float]]]:
    axes = bench_plot._figure(figures).axes[panel]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_a_sweep_has_goodput_over_rate() -> None:
    found = lines(SWEEP, 2)
    assert found["within TTFT 300 ms"] == ([1.0, 2.0], [0.5, 0.25])
    assert found["answered"] == ([1.0, 2.0], [0.75, 0.75])
    assert set(lines(SWEEP, 0)) == {"1/s", "2/s"}
    assert lines(SWEEP, 1)["2/s"][0][-1] == 1000.0
    assert len(bench_plot._figure(SINGLE).axes) == 2


@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("figures", [SINGLE, SWEEP, {"runs": [row(1.0), row(2.0)]}])
def test_figures_that_were_kept_are_drawn_again_the_same(tmp_path: Path, figures: Any, kind: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps(figures))
    files = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for file in files:
        assert main(["bench", "plot", str(tmp_path / "x.json"), str(file)]) == ExitCode.OK
    assert files[0].read_bytes().startswith(b"<?xml" if kind == "svg" else b"\x89PNG")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}', '{"summary": 1, "requests": 2}'])
def test_what_has_no_figures_is_a_usage_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main(["bench", "plot", str(tmp_path / "x.json"), str(tmp_path / "x.svg")]) == ExitCode.USAGE
    assert not (tmp_path / "x.svg").exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[bench\]'"):
        bench_plot.check()


def test_colours_follow_the_order_of_the_rates() -> None:
    def lightness(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    colours: Sequence[str] = list(bench_plot._colours(4))
    assert sorted(colours, key=lightness, reverse=True) == list(colours)
