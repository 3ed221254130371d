"""KV made anew on its way: numbers against torch's, and the limits of what rounding may do."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from kvrelay.connector import convert
from kvrelay.connector.base import TokenRange
from kvrelay.connector.convert import Packer
from kvrelay.connector.transit import agree_transit
from kvrelay.engine.kv_layout import KVLayout, blocks_for

FLOATS = arrays.arrays(np.float32, (5, 16), elements=st.floats(width=32))
SANE = arrays.arrays(
    np.float32, (5, 16), elements=st.one_of(st.just(0.0), st.floats(-1e4, 1e4, width=32), st.floats(-1, 1, width=32))
)
SCALED = [(convert.to_int8, convert.from_int8, 127.0), (convert.to_fp8, convert.from_fp8, 448.0)]


@given(FLOATS)
def test_bfloat16_is_rounded_as_torch_does_and_widened_exactly(values: np.ndarray) -> None:
    narrow = convert.from_float32(values, "bfloat16")
    expected = torch.from_numpy(values).bfloat16()
    wide = convert.to_float32(narrow, "bfloat16")
    assert np.array_equal(wide, expected.float().numpy(), equal_nan=True)
    numbers = ~np.isnan(values)
    assert np.array_equal(narrow[numbers], expected.view(torch.uint16).numpy()[numbers])


def test_every_bfloat16_survives_a_float32() -> None:
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    back = convert.from_float32(convert.to_float32(every, "bfloat16"), "bfloat16")
    quiet = every | np.where(np.isnan(convert.to_float32(every, "bfloat16")), np.uint16(0x40), np.uint16(0))
    assert np.array_equal(back, quiet)


def test_every_code_of_fp8_means_what_it_means_to_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    numbers = ~np.isnan(expected)
    assert np.array_equal(convert.decode_e4m3(codes)[numbers], expected[numbers])
    assert np.array_equal(convert.encode_e4m3(expected[numbers]), codes[numbers])


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
def test_fp8_is_the_nearest(values: list[float]) -> None:
    given = np.array(values, np.float32)
    expected = torch.from_numpy(given).to(torch.float8_e4m3fn).float().numpy()
    mine = convert.decode_e4m3(convert.encode_e4m3(given))
    nearest, distance = np.abs(expected - given), np.abs(mine - given)
    assert (distance <= nearest * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize(("pack", "unpack", "largest"), SCALED)
@given(values=SANE)
def test_a_scaled_element_is_off_by_half_a_step_at_most(pack, unpack, largest, values: np.ndarray) -> None:
    codes, scales = pack(values)
    back = unpack(codes, scales)
    magnitudes = np.abs(values).max(axis=-1, keepdims=True)
    step = magnitudes / largest if largest == 127 else np.maximum(np.abs(values) / 8, magnitudes / largest / 2**9)
    assert (np.abs(back - values) <= step * 0.50001 + 1e-30).all()
    assert (np.abs(back) <= magnitudes * 1.000001).all()
    assert not back[magnitudes[:, 0] == 0].any()


@pytest.mark.parametrize(("pack", "unpack", "largest"), SCALED)
@given(values=FLOATS)
def test_no_number_is_made_of_what_is_none(pack, unpack, largest, values: np.ndarray) -> None:
    """A run that holds an infinity or a NaN comes out as NaN, whole; other runs as numbers."""
    codes, scales = pack(values)
    with np.errstate(invalid="ignore", over="ignore"):
        back = unpack(codes, scales)
    broken = ~np.isfinite(values).all(axis=-1)
    assert np.isnan(back[broken]).all()
    assert not np.isnan(back[~broken]).any()


@st.composite
def prompts(draw):
    """(transit, num_tokens): any two block sizes and dtypes."""
    dtypes = draw(st.sampled_from([("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]))
    p, d = (
        KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=draw(st.integers(1, 9)), dtype=dtype)
        for dtype in dtypes
    )
    return agree_transit(p, d), draw(st.integers(1, 40))


@given(prompts(), st.randoms(use_true_random=False))
def test_packed_and_widened_every_token_is_at_its_place(case, rng) -> None:
    """Seen to catch a range that starts at its block's beginning, and slots behind the last token left as they were."""
    transit, num_tokens = case
    p, d = transit.source, transit.target
    tokens = np.arange(1, num_tokens * 16 + 1, dtype=np.float32).reshape(num_tokens, 2, 2, 1, 4) % 251
    ids = rng.sample(range(60), blocks_for(num_tokens, p.block_size))
    pool = np.full((60, 2, 2, 1, p.block_size, 4), 77, np.float32)
    for position in range(num_tokens):
        pool[ids[position // p.block_size], :, :, :, position % p.block_size] = tokens[position]
    region = np.ascontiguousarray(convert.from_float32(pool, p.dtype)).reshape(60, -1).view(np.uint8)
    packer = Packer(transit, region)
    for block in range(blocks_for(num_tokens, d.block_size)):
        start, end = block * d.block_size, min((block + 1) * d.block_size, num_tokens)
        sources = ids[start // p.block_size : blocks_for(end, p.block_size)]
        out = np.full(d.block_bytes, 0xA5, np.uint8)
        packer.pack(sources, TokenRange(start, end), out[: transit.block_bytes])
        if transit.is_widened:
            convert.widen(transit, out)
        else:
            assert transit.block_bytes == d.block_bytes
        got = convert.to_float32(out.view(convert.stored_dtype(d.dtype)), d.dtype).reshape(2, 2, 1, d.block_size, 4)
        for slot in range(d.block_size):
            expected = tokens[start + slot] if start + slot < end else np.zeros_like(tokens[0])
            assert np.array_equal(got[:, :, :, slot], expected)
