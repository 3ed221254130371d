"""In which form KV travels between two nodes, and who is refused."""

from dataclasses import asdict, replace
from itertools import product
from typing import get_args

import pytest

from kvrelay.connector.transit import MAX_BLOCK_BYTES, TRANSIT_BYTES, agree_transit
from kvrelay.engine.config import KvTransferDtype
from kvrelay.engine.errors import KvrelayError, LayoutMismatch, PreconditionFailed
from kvrelay.engine.kv_layout import KVLayout

BF16 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
F32 = replace(BF16, dtype="float32")
F16 = replace(BF16, dtype="float16")


@pytest.mark.parametrize("layout", [BF16, F32, F16])
def test_like_nodes_copy_bytes_as_they_lie(layout: KVLayout) -> None:
    transit = agree_transit(layout, layout)
    assert transit.is_direct
    assert not transit.is_widened
    assert transit.block_bytes == layout.block_bytes


def test_a_wish_for_what_the_pools_hold_changes_nothing() -> None:
    assert agree_transit(BF16, BF16, "bfloat16").is_direct


@pytest.mark.parametrize(
    ("p", "d", "wish", "travels", "num_bytes", "is_widened"),
    [
        (BF16, replace(BF16, block_size=32), "auto", "bfloat16", 2 * BF16.block_bytes, False),
        (F16, replace(F16, block_size=8), "auto", "float16", F16.block_bytes // 2, False),
        (BF16, F32, "auto", "bfloat16", BF16.block_bytes, True),
        (F32, BF16, "auto", "bfloat16", BF16.block_bytes, False),
        (F32, F32, "bfloat16", "bfloat16", BF16.block_bytes, True),
        (BF16, BF16, "int8", "int8", BF16.block_bytes // 2 * 68 // 64, True),
        (F32, replace(BF16, block_size=8), "fp8", "fp8", BF16.block_bytes // 4 * 68 // 64, True),
    ],
)
def test_elements_travel_in_the_narrower_dtype_or_the_one_asked_for(
    p: KVLayout, d: KVLayout, wish: str, travels: str, num_bytes: int, is_widened: bool
) -> None:
    for wishes in ((wish, "auto"), ("auto", wish), (wish, wish)):
        transit = agree_transit(p, d, *wishes)
        assert (transit.dtype, transit.block_bytes, transit.is_widened) == (travels, num_bytes, is_widened)
        assert not transit.is_direct


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_another_shape_is_refused_by_its_field(field: str) -> None:
    other = KVLayout(**{**asdict(BF16), field: 640})
    with pytest.raises(LayoutMismatch, match=f"{field} differs: .* on the prefill node, 640 on the decode") as refused:
        agree_transit(BF16, other)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("p", "d", "wishes", "field"),
    [
        (BF16, F16, ("auto", "auto"), "dtype"),
        (F16, F32, ("auto", "auto"), "dtype"),
        (F16, F16, ("int8", "auto"), "kv_transfer_dtype"),
        (BF16, BF16, ("int8", "fp8"), "kv_transfer_dtype"),
        (BF16, BF16, ("int3", "auto"), "kv_transfer_dtype"),
        (BF16, replace(BF16, block_size=0), ("auto", "auto"), "block_size"),
        (BF16, replace(BF16, block_size=2**31), ("auto", "auto"), "block_size"),
        (replace(BF16, head_dim=2), replace(BF16, head_dim=2), ("int8", "auto"), "kv_transfer_dtype"),
        (replace(BF16, dtype="int7"), F32, ("auto", "auto"), "dtype"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_its_field(
    p: KVLayout, d: KVLayout, wishes: tuple[str, str], field: str
) -> None:
    with pytest.raises(PreconditionFailed, match=field):
        agree_transit(p, d, *wishes)


def test_every_agreed_form_fits_in_ds_block_and_its_room_is_bounded() -> None:
    """What travels is put into the beginning of D's own blocks."""
    agreed = 0
    for dtypes, sizes, head_dim, wish in product(
        product(("bfloat16", "float32", "float16"), repeat=2),
        product((1, 7, 2**20), repeat=2),
        (1, 3, 8, 128),
        get_args(KvTransferDtype),
    ):
        p, d = (
            KVLayout(num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=size, dtype=dtype)
            for size, dtype in zip(sizes, dtypes, strict=True)
        )
        try:
            transit = agree_transit(p, d, wish)
        except KvrelayError:
            continue
        agreed += 1
        assert transit.dtype in TRANSIT_BYTES
        assert 0 < transit.block_bytes <= d.block_bytes
        assert transit.is_direct or d.block_bytes <= MAX_BLOCK_BYTES
    assert agreed > 50
