"""Nodes whose block sizes or KV dtypes differ, over every transport and the fake: what arrives, and the ends."""

import threading
from dataclasses import replace

import pytest
import torch
from support.connector import NUM_BLOCKS, TRANSPORTS, Pair, wait_until
from support.unlike import expected_blocks, fill, pool_of, unlike_layouts

from kvrelay.connector import staging
from kvrelay.connector.base import CancelOutcome, Failed, FailReason, Landed, Released, SessionLost
from kvrelay.connector.transit import agree_transit
from kvrelay.engine.kv_layout import blocks_for

SIZES = [(4, 4), (4, 8), (8, 4), (3, 5)]
DTYPES = [  # P's pool, D's pool, kv_transfer_dtype, what travels
    ("float32", "float32", "auto", "float32"),
    ("bfloat16", "float32", "auto", "bfloat16"),
    ("float32", "bfloat16", "auto", "bfloat16"),
    ("float32", "float32", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "int8", "int8"),
    ("float32", "bfloat16", "int8", "int8"),
    ("bfloat16", "bfloat16", "fp8", "fp8"),
    ("bfloat16", "float32", "fp8", "fp8"),
]
CASES = [(*sizes, dtypes) for sizes in SIZES for dtypes in DTYPES if (sizes, dtypes) != (SIZES[0], DTYPES[0])]


def named(value):
    return "-".join(value[:3]) if isinstance(value, tuple) else str(value)


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def make(transport, caplog):
    """Pairs of unlike nodes, with numbers in P's pool and noise in D's; at the end all must be whole again."""
    pairs = []

    def make_pair(p_size=4, d_size=8, dtypes=DTYPES[0], **values):
        p_dtype, d_dtype, wish, _ = dtypes
        layout, d_layout = unlike_layouts(p_size, d_size, p_dtype, d_dtype)
        p = {"transfer_dtype": wish} | values.pop("p", {})
        pairs.append(Pair(transport, layout=layout, d_layout=d_layout, p=p, **values))
        fill(pairs[-1].p.region, layout)
        pairs[-1].d.region[:] = 0xA5
        return pairs[-1]

    yield make_pair
    for pair in pairs:
        pair.close()
    assert not [record for record in caplog.records if record.exc_info], "a callback failed"


def transit_of(pair):
    return agree_transit(pair.layout, pair.d_layout, pair.p_values["transfer_dtype"])


def wanted_ranges(pair, num_tokens, num_cached=0, first_block=20):
    """What D asks for that has its first `num_cached` blocks already."""
    size = pair.d_layout.block_size
    start = min(num_cached, num_tokens // size) * size
    num_missing = blocks_for(num_tokens, size) - start // size
    return [(start, num_tokens, tuple(range(first_block, first_block + num_missing)))] if num_missing else []


def check_granted(pair, key, num_tokens, ranges, transit_dtype):
    pool, expected = pool_of(pair.d.region, pair.d_layout), expected_blocks(pair, key, num_tokens, transit_dtype)
    granted = set()
    for start, _end, block_ids in ranges:
        for i, block_id in enumerate(block_ids):
            block = start // pair.d_layout.block_size + i
            assert torch.equal(pool[block_id], expected[block]), f"block {block} of the prompt"
            granted.add(block_id)
    return granted


def check(pair, key, num_tokens, ranges, transit_dtype):
    """Each granted block holds P's tokens, and nothing else was touched."""
    granted = check_granted(pair, key, num_tokens, ranges, transit_dtype)
    for block_id in set(range(NUM_BLOCKS)) - granted:
        assert (pair.d.region[block_id] == 0xA5).all(), f"block {block_id} was not granted"


@pytest.mark.parametrize(("p_size", "d_size", "dtypes"), CASES, ids=named)
def test_tokens_arrive_at_their_positions_in_ds_blocks_and_dtype(make, p_size, d_size, dtypes):
    """A01, A03: at every edge of either node's blocks, over blocks in no order on both sides."""
    pair = make(p_size, d_size, dtypes)
    for i, num_tokens in enumerate((1, p_size, d_size + 1, 3 * p_size * d_size - 1, 41)):
        p_blocks = [(7 * b + i) % NUM_BLOCKS for b in range(blocks_for(num_tokens, p_size))]
        ranges = wanted_ranges(pair, num_tokens)
        key = pair.run(f"r{i}", num_tokens, ranges, p_blocks)
        check(pair, key, num_tokens, ranges, dtypes[3])
        pair.d.region[:] = 0xA5


@pytest.mark.parametrize(("p_size", "d_size", "dtypes"), CASES[::3], ids=named)
def test_the_bytes_on_the_wire_are_those_of_the_missing_blocks(make, p_size, d_size, dtypes):
    """At no, some and full hits in D's cache: what both sides count, and what they say."""
    pair = make(p_size, d_size, dtypes)
    num_tokens = 2 * p_size * d_size + 1 if (p_size, d_size) == (3, 5) else 4 * p_size * d_size
    num_blocks, sent = blocks_for(num_tokens, d_size), 0
    for num_cached in (0, 1, num_blocks - 1, num_blocks):
        ranges = wanted_ranges(pair, num_tokens, num_cached)
        num_missing = sum(len(block_ids) for _start, _end, block_ids in ranges)
        key = pair.run(f"r{num_cached}", num_tokens, ranges, p_blocks=range(blocks_for(num_tokens, p_size)))
        num_bytes = num_missing * transit_of(pair).block_bytes
        sent += num_bytes
        assert pair.d.of(Landed, key)[0].num_bytes == num_bytes
        assert pair.sender.statistics().num_bytes == pair.receiver.statistics().num_bytes == sent
    assert num_missing == (1 if num_tokens % d_size else 0), "the last was a full hit"


def test_quantised_kv_is_little_more_than_half_the_bytes(make):
    layouts = [replace(layout, head_dim=64) for layout in unlike_layouts(16, 16, "bfloat16", "bfloat16")]
    for dtype in ("int8", "fp8"):
        transit = agree_transit(*layouts, dtype)
        assert transit.block_bytes / layouts[1].block_bytes == (64 + 4) / 128


def test_a_block_travels_as_soon_as_its_tokens_are_final(make):
    """Chunks of P's blocks; D's blocks are larger, so some chunks complete none."""
    pair = make(4, 8, DTYPES[4])
    size = transit_of(pair).block_bytes
    key = pair.begin("r", 21, wanted_ranges(pair, 21))
    for start, end, num_blocks in ((0, 4, 0), (4, 8, 1), (8, 16, 2), (16, 20, 2), (20, 21, 3)):
        pair.push(key, start, end)
        wait_until(lambda num=num_blocks: pair.sender.statistics().num_bytes == num * size)
    pair.commit(key)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)
    check(pair, key, 21, wanted_ranges(pair, 21), "int8")


def test_layers_pushed_apart_travel_once(make):
    pair = make(4, 8, DTYPES[0])
    key = pair.begin("r", 11, wanted_ranges(pair, 11))
    pair.push(key, 0, 8, layers=range(2))
    pair.push(key, 0, 11, layers=range(1, 3))
    pair.push(key, 0, 11)
    pair.commit(key)
    pair.d.wait(Landed, key)
    pair.p.wait(Released, key)
    check(pair, key, 11, wanted_ranges(pair, 11), "float32")
    assert pair.sender.statistics().num_bytes == 2 * pair.d_layout.block_bytes


def test_many_transfers_through_a_staging_that_holds_few_blocks(make, monkeypatch):
    """Each waits for room, none for ever, and none gets another's bytes."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    pair = make(4, 8, DTYPES[4])
    names = [f"r{i}" for i in range(6)]
    keys = {}
    for i, name in enumerate(names):
        ranges = wanted_ranges(pair, 75, first_block=10 * i)
        keys[name] = pair.begin(name, 75, ranges, p_blocks=[(b + 5 * i) % NUM_BLOCKS for b in range(19)]), ranges
    (only,) = pair.sender._stagings.values()
    assert len(only.staging) == 4
    for key, _ranges in keys.values():
        pair.push(key, 0, 75)
        pair.commit(key)
    for key, ranges in keys.values():
        pair.d.wait(Landed, key)
        pair.p.wait(Released, key)
        check_granted(pair, key, 75, ranges, "int8")


# --- ends ---


@pytest.mark.parametrize("num_pushed", [0, 4, 8, 20])
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_cancel_in_mid_transfer_ends_both_sides_and_writes_nothing_more(make, side, num_pushed):
    """A06."""
    pair = make(4, 8, DTYPES[4])
    ranges = wanted_ranges(pair, 20, first_block=1)
    key = pair.begin("r", 20, ranges)
    wait_until(lambda: pair.sender.statistics().states == {"SENDING": 1})
    if num_pushed:
        pair.push(key, 0, num_pushed)
    if side == "p":
        if pair.cancel_p(key) is CancelOutcome.PENDING:
            pair.p.wait(Released, key)
        pair.d.wait(Released, key)
    elif pair.cancel_d(key) is CancelOutcome.PENDING:
        pair.d.wait(Released, key)
    pair.d.region[1:4] = 77
    pair.push(key, 0, 20)
    if side == "d":
        assert pair.p.wait(Failed, key).reason == FailReason.REVOKED
        pair.p.wait(Released, key)
    assert (pair.d.region[1:4] == 77).all()
    pair.run("next", 20, ranges)


def test_a_cancel_while_p_packs_waits_for_the_packing(make):
    """P's blocks and the staging are given back when the packing thread has left them."""
    pair = make(4, 8, DTYPES[4])
    inside, gate = threading.Event(), threading.Event()
    (only,) = pair.sender._stagings.values()
    pack = only._packer.pack
    only._packer.pack = lambda *args: (inside.set(), gate.wait(), pack(*args))
    key = pair.begin("r", 8, wanted_ranges(pair, 8))
    pair.push(key, 0, 8)
    inside.wait()
    assert pair.cancel_p(key) is CancelOutcome.PENDING
    assert not pair.p.collect()
    gate.set()
    pair.p.wait(Released, key)
    pair.d.wait(Released, key)
    assert pair.sender.statistics().num_bytes == 0


@pytest.mark.parametrize("end", ["cancel", "loss of p"])
def test_an_end_while_d_widens_waits_for_it(make, end):
    """D's blocks are given back when its own thread has left them, whatever P says or does meanwhile."""
    pair = make(4, 8, DTYPES[4])
    gate = threading.Event()
    pair.receiver._finisher._loop.post(gate.wait)
    key = pair.begin("r", 20, wanted_ranges(pair, 20))
    pair.push(key, 0, 20)
    pair.commit(key)
    wait_until(lambda: pair.receiver._transfers.get(key).is_in_hand)
    if end == "cancel":
        assert pair.cancel_d(key) is CancelOutcome.PENDING
        pair.p.wait(Failed, key)
    else:
        pair.sender.close()
        pair.d.wait(SessionLost)
    assert not pair.d.collect()
    assert not pair.d.of(Released, key)
    gate.set()
    pair.d.wait(Released, key)
    pair.p.wait(Released, key)
    assert not pair.d.of(Landed, key)


# --- digests ---


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[4]], ids=lambda d: d[3])
def test_digests_are_of_what_travels(make, dtypes, monkeypatch):
    pair = make(4, 8, dtypes, p={"kv_digests": True})
    ranges = wanted_ranges(pair, 21, num_cached=1)
    key = pair.run("same", 21, ranges)
    check(pair, key, 21, ranges, dtypes[3])
    monkeypatch.setattr(staging, "block_digest", lambda block: b"?" * 16)
    key = pair.begin("other", 21, ranges)
    pair.push(key, 0, 21)
    pair.commit(key)
    failed = pair.d.wait(Failed, key)
    assert (failed.reason, failed.retryable) == (FailReason.DATA_FAILED, True)
    pair.d.wait(Released, key)
    pair.p.wait(Released, key)


# --- who does not fit ---


@pytest.mark.parametrize(
    ("p", "d", "field"),
    [
        ({"transfer_dtype": "int8"}, {"transfer_dtype": "fp8"}, "kv_transfer_dtype"),
        ({}, {"layout": replace(unlike_layouts(4, 8)[1], num_kv_heads=1)}, "num_kv_heads"),
        ({}, {"layout": replace(unlike_layouts(4, 8)[1], dtype="float16")}, "dtype"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_its_field(transport, p, d, field):
    layout, d_layout = unlike_layouts(4, 8)
    d_layout = d.get("layout", d_layout)
    pair = Pair(transport, layout=layout, d_layout=d_layout, p=p, d=d, connect=False)
    pair.sender.connect(pair.d_values["epoch"], pair.receiver.address())
    assert field in pair.p.wait(SessionLost).reason
    pair.close()
