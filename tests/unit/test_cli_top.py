"""What `kvrelay top` draws: from looks at a cluster to lines, without a terminal."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from kvrelay.cli.top_view import Blocks, Look, NodeLook, Quantiles, bar, render, size, split, transfer_rates

POOL = Blocks(total=100, free=50, cached=20, held=29, quarantined=1)
PREFILL = NodeLook(
    role="prefill",
    epoch="p1",
    name="prefill-0",
    age_s=0.5,
    blocks=POOL,
    num_running=3,
    num_waiting=12,
    tokens_per_s=1234.4,
    num_transfers=2,
    num_transferred_bytes=7_000_000,
    num_prefix_queries=200,
    num_prefix_hits=50,
    transports=("shm",),
)
DECODE = replace(PREFILL, role="decode", epoch="d1", name="east", num_waiting=0, num_preemptions=4)
LOOK = Look(
    at_s=10.0,
    model="fake",
    num_running=5,
    num_waiting=2,
    num_finished=1234,
    num_failed=1,
    tokens_per_s=88.25,
    ttft_ms=Quantiles(31.4, 95.0, 1200.0),
    nodes=(PREFILL, DECODE),
)


def drawn(look: Look | None, before: Look | None = None, *, width: int = 120, **more: object) -> str:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render("host:1", look, before, width=width, **more))
    return capture.get()


def row_of(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if name in line).split()


def test_the_router_s_line_has_requests_speed_and_latencies() -> None:
    lines = drawn(LOOK).splitlines()
    assert lines[0].split("   ") == ["fake at host:1", "requests 5 running, 2 waiting", "88.2 tokens/s"]
    assert lines[1].split("   ") == [
        "TTFT p50/p90/p99 31 / 95 / 1,200 ms",
        "ITL p50/p90/p99 -",
        "finished 1,234, failed 1, refused 0",
    ]


def test_a_node_s_row_has_its_pool_its_queue_and_its_transfers() -> None:
    text = drawn(LOOK, replace(LOOK, at_s=8.0, nodes=(replace(PREFILL, num_transferred_bytes=1_000_000), DECODE)))
    name, pool, *rest = row_of(text, "prefill-0")
    assert name == "prefill-0"
    assert {sign: pool.count(sign) for sign in "█▒▓·"} == {"█": 11, "▒": 1, "▓": 7, "·": 17}
    assert rest == ["30%", "3", "12", "1,234", "2", "3.0", "MB", "25%", "0", "shm"]
    assert row_of(text, "east")[:2] == ["east", "decode"]  # its name does not say its role
    assert row_of(text, "east")[-6:] == ["2", "0", "B", "25%", "4", "shm"]


def test_what_travels_is_what_decode_nodes_received_and_a_restarted_node_has_no_rate_yet() -> None:
    before = replace(LOOK, at_s=8.0, nodes=(replace(DECODE, num_transferred_bytes=0),))
    assert transfer_rates(LOOK, before) == {"d1": 3_500_000}
    assert "KV 3.5 MB/s" in drawn(LOOK, before)
    reborn = replace(LOOK, at_s=11.0, nodes=(replace(DECODE, epoch="d2", num_transferred_bytes=0),))
    assert transfer_rates(reborn, LOOK) == {}
    smaller = replace(LOOK, at_s=11.0, nodes=(replace(DECODE, num_transferred_bytes=0),))
    assert transfer_rates(smaller, LOOK) == {"d1": 0}
    assert transfer_rates(LOOK, LOOK) == {}


def test_a_node_that_drains_is_silent_or_has_said_nothing_yet_says_so() -> None:
    nodes = (
        replace(PREFILL, name="prefill-a", is_draining=True),
        replace(PREFILL, name="prefill-b", age_s=7.2),
        NodeLook(role="prefill", epoch="x", name="prefill-c"),
    )
    text = drawn(replace(LOOK, nodes=nodes))
    assert "prefill-a drains" in text
    assert "prefill-b silent 7 s" in text
    assert row_of(text, "prefill-c")[1:5] == ["no", "report", "yet", "-"]
    assert "no node has registered" in drawn(replace(LOOK, nodes=()))


def test_without_the_router_it_says_so_and_keeps_the_last_look() -> None:
    text = drawn(LOOK, error="nobody answers at host:1")
    assert text.splitlines()[0] == "no answer from the router: nobody answers at host:1; still trying"
    assert "prefill-0" in text
    assert drawn(None, error="x").splitlines() == ["no answer from the router: x; still trying"]


@pytest.mark.parametrize("width", [20, 40, 60, 75, 76, 80, 100, 109, 110, 120, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    wide = replace(LOOK, nodes=(replace(PREFILL, name="prefill-" + "x" * 30), DECODE))
    for look in (LOOK, wide):
        assert max(map(len, drawn(look, look, width=width, error="e" * 300).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 100, 120])
def test_at_usual_widths_every_column_is_whole(width: int) -> None:
    text = drawn(LOOK, LOOK, width=width)
    assert "…" not in "".join(line for line in text.splitlines()[2:])
    assert row_of(text, "prefill-0")[2:6] == ["30%", "3", "12", "1,234"]


@pytest.mark.parametrize("height", [5, 10, 24])
def test_more_nodes_than_lines_are_counted(height: int) -> None:
    many = tuple(replace(PREFILL, name=f"prefill-{i}", epoch=str(i)) for i in range(30))
    text = drawn(replace(LOOK, nodes=many), height=height)
    shown = sum("prefill-" in line for line in text.splitlines())
    assert f"and {30 - shown} more" in text
    assert len(text.splitlines()) <= max(height, 7)


def test_a_bar_shows_however_little_there_is() -> None:
    assert bar(Blocks(total=10_000, free=9_999, cached=0, held=1, quarantined=0), 10).plain == "█" + "·" * 9
    assert bar(Blocks(total=0, free=0, cached=0, held=0, quarantined=0), 4).plain == "····"


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), st.integers(4, 60))
def test_a_bar_is_as_long_as_it_should_be_and_in_proportion(counts: list[int], width: int) -> None:
    lengths = split(counts, width)
    assert sum(lengths) == width
    assert all(length >= 0 for length in lengths)
    if sum(counts):
        assert all(bool(length) == bool(count) for length, count in zip(lengths, counts, strict=True))
        for length, count in zip(lengths, counts, strict=True):
            assert abs(length - count * width / sum(counts)) <= 4


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (99_949, "99.9 KB"), (123_456, "123 KB"), (999_600, "1.0 MB")],
)
def test_sizes_are_short(num_bytes: float, shown: str) -> None:
    assert size(num_bytes) == shown
    assert size(5.4e15) == "5400.0 TB"
