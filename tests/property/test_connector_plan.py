"""Plans by absolute position: what is pushed and wanted is copied once, to its own place, in whatever order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvrelay.connector.base import GrantedRange, GrantPlan, TokenRange
from kvrelay.connector.intervals import Intervals
from kvrelay.connector.plan import PushPlan, RecastPlan, check_plan, plan_block_ids, plan_positions
from kvrelay.connector.transit import agree_transit
from kvrelay.connector.transport.pieces import MAX_VIEWS, PIECE_BYTES, advance, cut
from kvrelay.connector.transport.target import Target
from kvrelay.engine.errors import InvalidArgument
from kvrelay.engine.kv_layout import KVLayout

B = 4
LAYOUT = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=B, dtype="float32")


@st.composite
def transfers(draw):
    """A prompt, the blocks D wants of it, and pushes that cover all of it, some twice, before and after the grant."""
    num_tokens = draw(st.integers(1, 40))
    num_blocks = -(-num_tokens // B)
    wanted = draw(st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks))
    ids = draw(st.permutations(range(50)))
    ranges, i = [], 0
    while i < num_blocks:
        end = i
        while end < num_blocks and wanted[end] and (end == i or draw(st.booleans())):
            end += 1
        if end > i:
            ranges.append(GrantedRange(i * B, min(end * B, num_tokens), tuple(ids[i:end])))
        i = max(end, i + 1)
    cuts = sorted(draw(st.sets(st.integers(1, num_blocks))) | {num_blocks})
    pushes = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        tokens = TokenRange(start * B, min(end * B, num_tokens))
        split = draw(st.integers(0, 3))
        pushes += [(tokens, range(split)), (tokens, range(split, 3))]
        if draw(st.booleans()):
            pushes.append((tokens, None))
    pushes = draw(st.permutations(pushes))
    return num_tokens, GrantPlan(tuple(ranges)), pushes, draw(st.integers(0, len(pushes)))


@given(transfers())
def test_every_wanted_byte_is_copied_once_to_its_own_place(case):
    """A01, A03. Seen to catch a mask that forgets what was pushed before, and a place counted from the end."""
    num_tokens, plan, pushes, grant_at = case
    source = tuple(range(100, 100 - (-num_tokens // B)))
    push_plan = PushPlan(source, num_tokens, LAYOUT)
    copies = []
    for i, (tokens, layers) in enumerate(pushes):
        if i == grant_at:
            push_plan.grant(plan)
            copies += push_plan.take_due()
        push_plan.push(tokens, layers)
        copies += push_plan.take_due()
    if grant_at == len(pushes):
        push_plan.grant(plan)
        copies += push_plan.take_due()
    targets, positions = plan_block_ids(plan), plan_positions(plan, B)
    written = np.zeros((len(targets), LAYOUT.block_bytes), int)
    for copy in copies:
        assert copy.target_block == targets[copy.index]
        assert copy.source_block == source[positions[copy.index]]
        written[copy.index, copy.start : copy.start + copy.size] += 1
    assert (written == 1).all()
    assert push_plan.num_granted_bytes == written.size


@given(transfers(), st.integers(1, 9))
def test_a_block_of_another_size_is_made_once_of_its_own_tokens_when_they_are_final(case, p_block_size):
    """D's plan is in blocks of four, as above; P's blocks are of another size, and its pushes lie on their boundaries.
    Seen to catch a block that is due with its first token, and one that is due twice."""
    num_tokens, plan, pushes, grant_at = case
    transit = agree_transit(replace(LAYOUT, block_size=p_block_size), LAYOUT, "int8")
    source = tuple(range(100, 100 - (-num_tokens // p_block_size)))
    recast_plan = RecastPlan(source, num_tokens, transit, digests=False)
    final, seen = {layer: set() for layer in range(3)}, []

    def take():
        for recast in recast_plan.take_due():
            positions = range(recast.tokens.start, recast.tokens.end)
            assert all(final[layer].issuperset(positions) for layer in range(3)), "not final"
            first = recast.tokens.start // p_block_size
            assert recast.sources == source[first : first + len(recast.sources)]
            assert len(recast.sources) == (recast.tokens.end - 1) // p_block_size - first + 1
            assert recast.size == transit.block_bytes
            seen.append(recast)

    for i, (tokens, layers) in enumerate(pushes):
        if i == grant_at:
            recast_plan.grant(plan)
            take()
        start = tokens.start // p_block_size * p_block_size  # on P's boundaries: more than was drawn
        end = min(-(-tokens.end // p_block_size) * p_block_size, num_tokens)
        recast_plan.push(TokenRange(start, end), layers)
        for layer in layers or range(3):
            final[layer] |= set(range(start, end))
        take()
    if grant_at == len(pushes):
        recast_plan.grant(plan)
        take()
    targets, positions = plan_block_ids(plan), plan_positions(plan, B)
    assert sorted(recast.index for recast in seen) == list(range(len(targets)))
    for recast in seen:
        start = positions[recast.index] * B
        assert (recast.target_block, recast.tokens) == (
            targets[recast.index],
            TokenRange(start, min(start + B, num_tokens)),
        )
    assert recast_plan.num_granted_bytes == len(targets) * transit.block_bytes


@given(transfers(), st.integers(0, 5), st.integers(-3, 3))
def test_a_grant_that_is_not_in_order_on_blocks_and_in_the_prompt_is_refused(case, which, shift):
    num_tokens, plan, _pushes, _grant_at = case
    check_plan(plan, num_tokens, B)
    if not plan.ranges or not shift:
        return
    r = plan.ranges[-1]
    broken = [
        GrantedRange(r.start + shift, r.end, r.block_ids),
        GrantedRange(r.start, num_tokens + abs(shift), r.block_ids),
        GrantedRange(r.start, r.end, r.block_ids + (60,) * abs(shift)),
        GrantedRange(r.start, r.start, ()),
        GrantedRange(r.end, r.start, r.block_ids),
        GrantedRange(r.start, r.end, r.block_ids[:-1]),
    ][which]
    if broken.start % B == 0 and which == 0:
        return
    with pytest.raises(InvalidArgument):
        check_plan(GrantPlan((*plan.ranges[:-1], broken)), num_tokens, B)
    with pytest.raises(InvalidArgument):
        check_plan(GrantPlan((*plan.ranges, r)), num_tokens, B)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40))
def test_intervals_are_a_set(spans):
    """Seen to catch a merge that forgets one of two neighbours."""
    intervals, oracle = Intervals(), set()
    for start, size in spans:
        added = set(range(start, start + size)) - oracle
        assert intervals.add(start, start + size) == len(added)
        oracle |= added
        assert intervals.total == len(oracle)
        runs = sum(1 for x in oracle if x - 1 not in oracle)
        assert len(intervals) == runs


@given(transfers(), st.sampled_from([48, 1000, 2**19, 2**20 + 5, 3 * 2**20]))
def test_pieces_cover_the_copies_and_none_is_too_large(case, block_bytes):
    num_tokens, plan, pushes, _grant_at = case
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=B, dtype="float32")
    push_plan = PushPlan(tuple(range(-(-num_tokens // B))), num_tokens, layout)
    push_plan.grant(plan)
    for tokens, layers in pushes:
        push_plan.push(tokens, layers)
    scale = block_bytes // layout.block_bytes or 1
    copies = [
        type(c)(c.source_block, c.target_block, c.index, c.start * scale, c.size * scale) for c in push_plan.take_due()
    ]
    size = layout.block_bytes * scale
    sources = {copy.index: copy.source_block for copy in copies}
    pool = np.zeros(10 * size, np.uint8)
    seen = Intervals()
    for piece in cut(copies, memoryview(pool), size):
        assert 0 < piece.size <= PIECE_BYTES
        assert 0 < len(piece.views) <= MAX_VIEWS
        assert seen.add(piece.offset, piece.offset + piece.size) == piece.size
        at = piece.offset
        for start, end in places(pool, piece.views):
            assert start == sources[at // size] * size + at % size
            assert end <= (sources[at // size] + 1) * size
            at += end - start
        assert at == piece.offset + piece.size
    assert seen.total == sum(copy.size for copy in copies)


def places(pool, views):
    """The [start, end) of each view in the pool."""
    base = pool.ctypes.data
    starts = [np.frombuffer(view, np.uint8).ctypes.data - base for view in views]
    return [(start, start + len(view)) for start, view in zip(starts, views, strict=True)]


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(1, 9), st.data())
def test_bytes_at_any_offset_of_a_grant_go_to_the_block_that_the_grant_says(blocks, num_blocks, block_bytes, data):
    pool = np.zeros(8 * block_bytes, np.uint8)
    target = Target.of(blocks[:num_blocks], block_bytes)
    offset = data.draw(st.integers(0, target.size - 1))
    size = data.draw(st.integers(1, target.size - offset))
    target.check(offset, size)
    found = [i for start, end in places(pool, target.views(memoryview(pool), offset, size)) for i in range(start, end)]
    assert found == [blocks[at // block_bytes] * block_bytes + at % block_bytes for at in range(offset, offset + size)]


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=8), st.data())
def test_what_is_left_behind_the_first_bytes_of_views(parts, data):
    whole = b"".join(parts)
    size = data.draw(st.integers(0, len(whole)))
    left = advance([memoryview(part) for part in parts], size)
    assert b"".join(left) == whole[size:]
    assert all(left)
