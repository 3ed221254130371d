"""Writing keys and values into the paged cache, in Triton: one program a row. Shapes: see base."""

import triton
import triton.language as tl
from torch import Tensor


def reshape_and_cache(k_TKD: Tensor, v_TKD: Tensor, kv_N2KBD: Tensor, slot_mapping_T: Tensor) -> None:
    """A slot outside the pool writes nothing either: to say so would be to wait for the GPU."""
    num_rows, num_kv_heads, head_dim = k_TKD.shape
    num_blocks, _, _, block_size, _ = kv_N2KBD.shape
    if num_rows:
        _reshape_and_cache[(num_rows,)](
            k_TKD,
            v_TKD,
            kv_N2KBD,
            slot_mapping_T,
            *k_TKD.stride(),
            *v_TKD.stride(),
            *kv_N2KBD.stride(),
            *slot_mapping_T.stride(),
            num_blocks * block_size,
            num_kv_heads,
            head_dim,
            BLOCK_SIZE=block_size,
            KV_HEADS=triton.next_power_of_2(num_kv_heads),
            HEAD_DIM=triton.next_power_of_2(head_dim),
        )


@triton.jit
def _reshape_and_cache(
    k,
    v,
    kv,
    slot_mapping,
    k_row_stride,
    k_head_stride,
    k_stride,
    v_row_stride,
    v_head_stride,
    v_stride,
    kv_block_stride,
    kv_value_stride,
    kv_head_stride,
    kv_offset_stride,
    kv_stride,
    slot_stride,
    num_slots,
    num_kv_heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row * slot_stride).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.arange(0, KV_HEADS)[:, None]
    element = tl.arange(0, HEAD_DIM)[None, :]
    mask = (head < num_kv_heads) & (element < head_dim)
    keys = tl.load(k + row * k_row_stride + head * k_head_stride + element * k_stride, mask=mask)
    values = tl.load(v + row * v_row_stride + head * v_head_stride + element * v_stride, mask=mask)
    place = kv + slot // BLOCK_SIZE * kv_block_stride + slot % BLOCK_SIZE * kv_offset_stride
    place += head * kv_head_stride + element * kv_stride
    tl.store(place, keys, mask=mask)
    tl.store(place + kv_value_stride, values, mask=mask)
