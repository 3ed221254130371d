"""Attention over the paged cache, in Triton: decode steps, chunks and whole prompts by the same arithmetic.

A tile is as many consecutive queries of one sequence as give ROWS rows with the heads that share one KV head. One
program computes a tile over one split: SPLIT keys cut at absolute positions. A second kernel adds a tile's splits up in
order. So one sequence with many keys still fills a GPU.

Batch-invariant as the reference is: how keys are cut, and in which order they are added, depends on their positions
alone, and a key that a row does not see adds an exact zero. A tile's size depends on the heads, never on the batch: a
prompt's tiles are no larger than a decode step's, and read its keys more often than they would have to.

Shapes: see base.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kernels.base import AttentionBatch

SPLIT = 256

_MIN_SIZE = 16  # of each side of a tensor core's product
_MAX_KEYS = 64  # of one product
_MAX_KEY_BYTES = 16_384  # of the keys of one product, and of its values: they wait in shared memory, some loads ahead
_MAX_PARTIAL_BYTES = 2**27  # of what the splits of one launch leave for the second kernel
_UNLIMITED = 2**40  # a window that no sequence reaches


def paged_attention(
    q_THD: Tensor, kv_N2KBD: Tensor, batch: AttentionBatch, *, scale: float, window: int, softcap: float
) -> Tensor:
    num_rows, num_heads, head_dim = q_THD.shape
    _, _, num_kv_heads, block_size, _ = kv_N2KBD.shape
    num_sequences, max_blocks = batch.block_tables.shape
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if not num_sequences:
        return out_THD

    group = num_heads // num_kv_heads
    rows = max(triton.next_power_of_2(group), _MIN_SIZE)
    padded_dim = max(triton.next_power_of_2(head_dim), _MIN_SIZE)
    keys = min(max(_MAX_KEY_BYTES // (padded_dim * kv_N2KBD.element_size()), _MIN_SIZE), _MAX_KEYS)
    tiling = {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "GROUP": group,
        "QUERIES": rows // group,
        "ROWS": rows,
        "SPLIT": SPLIT,
        "SEQUENCES": triton.next_power_of_2(num_sequences + 1),
    }
    # Both have to be known here without asking the GPU: some tiles turn out to have no queries, some splits no keys.
    num_tiles = num_rows // tiling["QUERIES"] + num_sequences
    num_splits = triton.cdiv(max_blocks * block_size, SPLIT)
    partial_rows = num_kv_heads * num_splits * rows  # of one tile
    tiles_per_launch = min(num_tiles, max(1, _MAX_PARTIAL_BYTES // (4 * partial_rows * head_dim)))
    sums = q_THD.new_empty(tiles_per_launch * partial_rows, head_dim, dtype=torch.float32)
    totals, largest = q_THD.new_empty(2, tiles_per_launch * partial_rows, dtype=torch.float32)
    places = (batch.query_starts, batch.seq_lens, num_sequences, window or _UNLIMITED)

    for first_tile in range(0, num_tiles, tiles_per_launch):
        grid = (min(tiles_per_launch, num_tiles - first_tile), num_kv_heads)
        _attend_to_split[(*grid, num_splits)](
            q_THD,
            kv_N2KBD,
            batch.block_tables,
            sums,
            totals,
            largest,
            first_tile,
            *places,
            scale,
            softcap,
            *q_THD.stride(),
            *kv_N2KBD.stride(),
            *batch.block_tables.stride(),
            **tiling,
            BLOCK_SIZE=block_size,
            KEYS=keys,
            HAS_SOFTCAP=softcap != 0,
            # Numbers of 16 bits are exact in tf32, whose products tensor cores compute; those of float32 are not.
            PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        )
        _add_splits[grid](out_THD, sums, totals, largest, first_tile, num_splits, *places, *out_THD.stride(), **tiling)
    return out_THD


@triton.jit
def _find_tile(tile, query_starts, seq_lens, num_sequences, QUERIES: tl.constexpr, SEQUENCES: tl.constexpr):
    """A tile's sequence, first row, number of queries (none if it is below one), and the first one's position.

    The tiles of sequence s are numbered from query_starts[s] // QUERIES + s on, which leaves room for all of them.
    """
    index = tl.arange(0, SEQUENCES)
    starts = tl.load(query_starts + index, mask=index <= num_sequences, other=0)
    is_before = (index <= num_sequences) & (starts // QUERIES + index <= tile)
    sequence = tl.sum(is_before.to(tl.int32)) - 1
    is_used = sequence < num_sequences
    start = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1, mask=is_used, other=0)
    seq_len = tl.load(seq_lens + sequence, mask=is_used, other=0)
    row = start + (tile - start // QUERIES - sequence) * QUERIES
    return sequence, row, tl.minimum(end - row, QUERIES), seq_len - (end - row)


@triton.jit
def _attend_to_split(
    q,
    kv,
    block_tables,
    sums,
    totals,
    largest,
    first_tile,
    query_starts,
    seq_lens,
    num_sequences,
    window,
    scale,
    softcap,
    q_row_stride,
    q_head_stride,
    q_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    kv_offset_stride,
    kv_stride,
    table_stride,
    entry_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile over one split: the largest score of each row, its weights' total and the sum of the weighted values."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first_row, num_queries, first_position = _find_tile(
        first_tile + tile, query_starts, seq_lens, num_sequences, QUERIES, SEQUENCES
    )
    begin = tl.maximum(first_position - window + 1, 0)  # of the keys that any row of the tile sees
    end = first_position + num_queries
    if (num_queries <= 0) | (split * SPLIT >= end) | ((split + 1) * SPLIT <= begin):
        return

    row = tl.arange(0, ROWS)
    query = row // GROUP
    is_query = query < num_queries
    positions = first_position + query
    element = tl.arange(0, PADDED_DIM)
    is_element = element < HEAD_DIM
    q_places = (first_row + query).to(tl.int64) * q_row_stride + (kv_head * GROUP + row % GROUP) * q_head_stride
    q_tile = tl.load(
        q + q_places[:, None] + (element * q_stride)[None, :],
        mask=is_query[:, None] & is_element[None, :],
        other=0.0,
    ).to(tl.float32)

    row_largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_totals = tl.zeros([ROWS], dtype=tl.float32)
    row_sums = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    first_key = tl.maximum(split * SPLIT, begin // KEYS * KEYS)
    for start in range(first_key, tl.minimum(end, (split + 1) * SPLIT), KEYS):
        key = start + tl.arange(0, KEYS)
        # The rest is not read, neither table nor block: a weight of zero does not silence a NaN.
        is_key = (key >= begin) & (key < end)
        entries = block_tables + sequence * table_stride + key // BLOCK_SIZE * entry_stride
        blocks = tl.load(entries, mask=is_key, other=0).to(tl.int64)
        places = kv + blocks * kv_block_stride + kv_head * kv_head_stride + key % BLOCK_SIZE * kv_offset_stride
        places = places[:, None] + (element * kv_stride)[None, :]
        mask = is_key[:, None] & is_element[None, :]
        keys = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(places + kv_value_stride, mask=mask, other=0.0).to(tl.float32)

        scores = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            # tanh by a power that cannot overflow
            power = tl.exp(-2 * tl.abs(scores / softcap))
            capped = softcap * (1 - power) / (1 + power)
            scores = tl.where(scores < 0, -capped, capped)
        distance = positions[:, None] - key[None, :]
        scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))

        new_largest = tl.maximum(row_largest, tl.max(scores, 1))
        # Of a row that has seen no key yet nothing is subtracted: infinity minus infinity is NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(row_largest - shift)
        row_totals = row_totals * decay + tl.sum(weights, 1)
        row_sums = row_sums * decay[:, None] + tl.dot(weights, values, input_precision=PRECISION)
        row_largest = new_largest

    partial = (tile * tl.num_programs(1) + kv_head) * tl.num_programs(2) + split
    partial_rows = partial.to(tl.int64) * ROWS + row
    tl.store(largest + partial_rows, row_largest, mask=is_query)
    tl.store(totals + partial_rows, row_totals, mask=is_query)
    tl.store(
        sums + partial_rows[:, None] * HEAD_DIM + element[None, :],
        row_sums,
        mask=is_query[:, None] & is_element[None, :],
    )


@triton.jit
def _add_splits(
    out,
    sums,
    totals,
    largest,
    first_tile,
    num_splits,
    query_starts,
    seq_lens,
    num_sequences,
    window,
    out_row_stride,
    out_head_stride,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """One tile's splits, one after the other; a split in which a row sees no key adds an exact zero to it."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    _, first_row, num_queries, first_position = _find_tile(
        first_tile + tile, query_starts, seq_lens, num_sequences, QUERIES, SEQUENCES
    )
    if num_queries <= 0:
        return
    begin = tl.maximum(first_position - window + 1, 0)
    end = first_position + num_queries

    row = tl.arange(0, ROWS)
    query = row // GROUP
    is_query = query < num_queries
    element = tl.arange(0, PADDED_DIM)
    mask = is_query[:, None] & (element < HEAD_DIM)[None, :]
    row_largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_totals = tl.zeros([ROWS], dtype=tl.float32)
    row_sums = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    for split in range(begin // SPLIT, (end - 1) // SPLIT + 1):
        partial = (tile * tl.num_programs(1) + kv_head) * num_splits + split
        partial_rows = partial.to(tl.int64) * ROWS + row
        split_largest = tl.load(largest + partial_rows, mask=is_query, other=float("-inf"))
        new_largest = tl.maximum(row_largest, split_largest)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay, weight = tl.exp(row_largest - shift), tl.exp(split_largest - shift)
        split_totals = tl.load(totals + partial_rows, mask=is_query, other=0.0)
        split_sums = tl.load(sums + partial_rows[:, None] * HEAD_DIM + element[None, :], mask=mask, other=0.0)
        row_totals = row_totals * decay + split_totals * weight
        row_sums = row_sums * decay[:, None] + split_sums * weight[:, None]
        row_largest = new_largest

    row_totals = tl.where(is_query, row_totals, 1.0)
    out_places = (first_row + query).to(tl.int64) * out_row_stride + (kv_head * GROUP + row % GROUP) * out_head_stride
    result = row_sums / row_totals[:, None]
    tl.store(out + out_places[:, None] + (element * out_stride)[None, :], result.to(out.dtype.element_ty), mask=mask)
