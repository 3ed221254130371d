"""What the dashboard asks for is there to be had, and docs/metrics.md tells of everything that is."""

import json
import re
from pathlib import Path
from typing import Any

from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.metrics import ProcessStatistics
from kvrelay.router.cluster_wire import RouterView
from kvrelay.router.dispatch import DispatchStatistics
from kvrelay.router.exposition import render
from kvrelay.router.messages import NodeFacts, Role
from kvrelay.router.metrics import RequestMetrics
from kvrelay.router.node_statistics import NodeStatistics
from kvrelay.router.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\bkvrelay_[a-z_]+")
OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")


class Clock:
    """Stands still."""

    def now(self) -> float:
        return 1.0


def exposed() -> dict[str, str]:
    """Every family's name as it is queried, and its type."""
    registry = Registry(2)
    facts: dict[str, Any] = {"version": "1", "model_fingerprint": "f", "max_model_len": 8, "num_blocks": 8}
    facts |= {"max_num_seqs": 1, "grpc_address": "", "device": "cpu", "kernels": "reference"}
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    registry.add(NodeFacts(role=Role.DECODE, epoch="e", name="d", kv_layout=layout, **facts))
    registry.keep_statistics("e", NodeStatistics(), 0.0)
    view = RouterView(
        model="m",
        num_requests=0,
        num_waiting=0,
        num_refused=0,
        dispatch=DispatchStatistics(num_running=0, num_finished=0, num_failed=0, num_left=0, num_late_deltas=0),
        requests=RequestMetrics(Clock()).statistics(),
        process=ProcessStatistics(),
    )
    page = render(view, registry, 1.0).decode()
    return dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE"))


def test_every_query_of_the_dashboard_finds_its_metric() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/kvrelay.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    types = exposed()
    for query in queries:
        for name in NAME.findall(query):
            family = next((name.removesuffix(end) for end in OF_A_HISTOGRAM if name.endswith(end)), name)
            assert family in types, query
            assert (types[family] == "histogram") == (family != name), query
            assert types[family] != "counter" or f"rate({name}" in query, f"a counter without a rate: {query}"


def test_panels_do_not_lie_over_one_another() -> None:
    panels = json.loads((ROOT / "deploy/grafana/kvrelay.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_the_documentation_lists_exactly_what_is_exposed() -> None:
    told = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        found = re.match(r"\| `(kvrelay_[a-z_]+)` \| (\w+) \|", line)
        if found:
            told[found[1]] = found[2]
    assert told == exposed()
