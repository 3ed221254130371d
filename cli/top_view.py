"""What `kvrelay top` shows, drawn from two looks at the cluster. Pure: no terminal, no clock, no socket."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_UNITS = ("B", "KB", "MB", "GB", "TB")
# Told apart without colours, too.
_PARTS = (("held", "█", "green"), ("quarantined", "▒", "red"), ("cached", "▓", "blue"), ("free", "·", "dim"))
_CHROME = 6  # lines that are no node: two of the router, an error, the legend, the table's head, the last one
_GAP = 2
_WIDE, _NARROW = 110, 76  # columns of the terminal from which, and below which, the table has more or less
STALE_S = 3.0  # a node reports once a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Of a node's KV pool."""

    total: int
    free: int
    cached: int  # found by later prompts, given away when room is needed
    held: int  # by requests and transfers
    quarantined: int  # may still be written by a peer that was lost


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLook:
    """One node at one moment; counters since its start."""

    role: str
    epoch: str
    name: str
    is_draining: bool = False
    age_s: float | None = None  # of its last report; None: there was none
    blocks: Blocks | None = None
    num_running: int = 0
    num_waiting: int = 0
    tokens_per_s: float = 0.0
    num_transfers: int = 0  # under way
    num_transferred_bytes: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of the latest values; None where there were none."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The cluster at one moment of the onlooker's clock."""

    at_s: float
    model: str
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_refused: int = 0
    tokens_per_s: float = 0.0
    ttft_ms: Quantiles | None = None
    itl_ms: Quantiles | None = None
    nodes: tuple[NodeLook, ...] = ()


def render(
    address: str,
    look: Look | None,
    before: Look | None = None,
    *,
    error: str = "",
    width: int = 100,
    height: int | None = None,
) -> RenderableType:
    """The screen. `before` is an earlier look, for rates. `error`: why there is no newer look than this one."""
    parts: list[RenderableType] = []
    if error:
        parts.append(Text(f"no answer from the router: {error}; still trying", style="bold red"))
    if look:
        rates = transfer_rates(look, before)
        parts += [_router(address, look, rates), _latencies(look), _nodes(look, rates, width, height), _legend()]
    return Group(*parts)


def transfer_rates(look: Look, before: Look | None) -> dict[str, float]:
    """KV bytes a second of each node that was there before, by epoch."""
    if before is None or look.at_s <= before.at_s:
        return {}
    known = {node.epoch: node.num_transferred_bytes for node in before.nodes}
    return {
        node.epoch: max(0, node.num_transferred_bytes - known[node.epoch]) / (look.at_s - before.at_s)
        for node in look.nodes
        if node.epoch in known
    }


def bar(blocks: Blocks, width: int) -> Text:
    """A pool as a line of `width` characters; whatever there is of a part shows, if only as one character."""
    text = Text(no_wrap=True)
    counts = [getattr(blocks, name) for name, _, _ in _PARTS]
    for (_, sign, style), length in zip(_PARTS, split(counts, width), strict=True):
        text.append(sign * length, style)
    return text


def split(counts: Sequence[int], width: int) -> list[int]:
    """`width` in proportion to `counts`, whole, none of what there is left out while there is room.

    Largest remainders get what is left over.
    """
    total = sum(counts)
    if not total:
        return [0] * (len(counts) - 1) + [width]
    exact = [count * width / total for count in counts]
    lengths = [int(value) for value in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: lengths[i] - exact[i])
    for i in by_remainder[: width - sum(lengths)]:
        lengths[i] += 1
    for i, count in enumerate(counts):
        longest = lengths.index(max(lengths))
        if count and not lengths[i] and lengths[longest] > 1:
            lengths[i], lengths[longest] = 1, lengths[longest] - 1
    return lengths


def size(num_bytes: float) -> str:
    """In powers of a thousand, as networks count."""
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 99.95 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def _router(address: str, look: Look, rates: dict[str, float]) -> Text:
    received = [rates[node.epoch] for node in look.nodes if node.role == "decode" and node.epoch in rates]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{look.model} at {address}", "bold")
    text.append(
        f"   requests {look.num_running} running, {look.num_waiting} waiting   {look.tokens_per_s:,.1f} tokens/s"
    )
    if received:
        text.append(f"   KV {size(sum(received))}/s")
    return text


def _latencies(look: Look) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, found in (("TTFT", look.ttft_ms), ("ITL", look.itl_ms)):
        shown = f"{found.p50:,.0f} / {found.p90:,.0f} / {found.p99:,.0f} ms" if found else "-"
        text.append(f"{name} p50/p90/p99 {shown}   ")
    text.append(f"finished {look.num_finished:,}, ")
    text.append(f"failed {look.num_failed:,}", "red" if look.num_failed else "")
    text.append(f", refused {look.num_refused:,}", "yellow" if look.num_refused else "")
    return text


def _legend() -> Text:
    text = Text("KV blocks: ", "dim", no_wrap=True, overflow="ellipsis")
    for name, sign, style in _PARTS:
        text.append(sign, style).append(f" {name}  ", "dim")
    return text


def _nodes(look: Look, rates: dict[str, float], width: int, height: int | None) -> RenderableType:
    if not look.nodes:
        return Text("\nno node has registered\n", style="yellow")
    names = _columns(width)
    room = len(look.nodes) if height is None else max(1, height - _CHROME)
    shown = look.nodes if len(look.nodes) <= room else look.nodes[: max(1, room - 1)]
    rows = [[cells[name] for name in names] for cells in (_cells(node, rates.get(node.epoch)) for node in shown)]
    taken = sum(max(len(name), *(row[i].cell_len for row in rows)) for i, name in enumerate(names))
    bar_width = max(6, min(40, width - taken - _GAP * (len(names) + 1)))
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for name in (names[0], "KV", *names[1:]):
        table.add_column(name, no_wrap=True, justify="left" if name in ("node", "KV", "over") else "right")
    for node, row in zip(shown, rows, strict=True):
        pool = bar(node.blocks, bar_width) if node.blocks else Text("no report yet", "dim")
        table.add_row(row[0], pool, *row[1:])
    hidden = len(look.nodes) - len(shown)
    return Group(table, Text(f"and {hidden} more", "dim")) if hidden else table


def _columns(width: int) -> list[str]:
    """But for the bar. As many as a terminal of this width has room for."""
    names = ["node", "held", "run", "wait"]
    if width >= _NARROW:
        names += ["tokens/s", "transfers", "KV/s"]
    return [*names, "hits", "preempted", "over"] if width >= _WIDE else names


def _cells(node: NodeLook, rate: float | None) -> dict[str, Text]:
    blocks = node.blocks
    held = f"{(blocks.held + blocks.quarantined) / blocks.total:.0%}" if blocks and blocks.total else "-"
    hits = f"{node.num_prefix_hits / node.num_prefix_queries:.0%}" if node.num_prefix_queries else "-"
    return {
        "node": _name(node),
        "held": Text(held),
        "run": Text(str(node.num_running)),
        "wait": Text(str(node.num_waiting), "yellow" if node.num_waiting else ""),
        "tokens/s": Text(f"{node.tokens_per_s:,.0f}"),
        "transfers": Text(str(node.num_transfers)),
        "KV/s": Text("-" if rate is None else size(rate)),
        "hits": Text(hits),
        "preempted": Text(str(node.num_preemptions)),
        "over": Text(", ".join(node.transports) or "-"),
    }


def _name(node: NodeLook) -> Text:
    name = Text(node.name or node.role, "bold cyan" if node.role == "prefill" else "bold magenta")
    if node.role not in node.name:
        name.append(f" {node.role}", "dim")
    if node.is_draining:
        name.append(" drains", "yellow")
    elif node.age_s is not None and node.age_s > STALE_S:
        name.append(f" silent {node.age_s:.0f} s", "red")
    return name
