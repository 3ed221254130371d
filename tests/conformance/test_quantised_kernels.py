"""Quantised weights: what they unpack to, and products with them, which have the bits of products with that.

Shapes: T rows, O outputs, C inputs, G groups.
"""

from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kvrelay.kernels.base import Kernels, QuantisedWeight
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import ReferenceKernels

Bits = Literal[4, 8]

THREADS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16)
# bits, inputs of a group, whether there are minimums, dtype of scales
FORMS = list(product((4, 8), (16, 32), (False, True), (torch.float16, torch.float32)))
KERNELS: list[Kernels] = [ReferenceKernels(), *(CpuKernels(count) for count in THREADS)]


def random_weight(
    num_outputs: int, num_inputs: int, form: tuple[Bits, int, bool, torch.dtype], dtype: torch.dtype, seed: int = 0
) -> QuantisedWeight:
    """Every code occurs, and scales of either sign."""
    bits, group, has_minimums, scale_dtype = form
    generator = torch.Generator().manual_seed(seed)
    first = 0 if bits == 4 and has_minimums else -(2 ** (bits - 1))
    codes = torch.randint(first, first + 2**bits, (num_outputs, num_inputs), generator=generator)
    scales, minimums = torch.randn(2, num_outputs, -(-num_inputs // group), generator=generator) / num_inputs**0.5
    if scale_dtype == torch.float32:  # more bits than a float16 has
        scales = scales.bfloat16().float() * 33
    return QuantisedWeight(
        codes.to(torch.int8),
        scales.to(scale_dtype),
        minimums.to(scale_dtype) if has_minimums else None,
        bits,
        group,
        dtype,
    )


def rounded_by_hand(weight: QuantisedWeight) -> Tensor:
    """In float64, where nothing is lost before it is rounded to float32 and then to the weight's dtype."""
    out = np.empty(weight.shape, np.float64)
    for o, c in np.ndindex(*weight.shape):
        scale, code = float(weight.scales[o, c // weight.group]), int(weight.codes[o, c])
        minimum = 0.0 if weight.minimums is None else float(weight.minimums[o, c // weight.group])
        out[o, c] = code * scale + minimum
    return torch.from_numpy(out.astype(np.float32)).to(weight.dtype)


def assert_same_products(weight: QuantisedWeight, kernels: Kernels, num_rows: int, seed: int = 0) -> None:
    num_outputs, num_inputs = weight.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(weight.dtype)
    bias = torch.randn(num_outputs, generator=generator).to(weight.dtype)
    packed, plain = kernels.pack_quantised(weight), kernels.pack(weight.unpacked())
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, plain))
    assert torch.equal(kernels.linear(x, packed, bias), kernels.linear(x, plain, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_its_dtypes_rounding_of_code_times_scale_plus_minimum(
    form: tuple[Bits, int, bool, torch.dtype], dtype: torch.dtype
) -> None:
    weight = random_weight(7, 77, form, dtype)
    assert torch.equal(weight.unpacked(), rounded_by_hand(weight))
    some = torch.tensor([5, 0, 5])
    assert torch.equal(weight[some].unpacked(), weight.unpacked()[some])
    assert torch.equal(weight[2:4].unpacked(), weight.unpacked()[2:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (8, 48), (331, 48), (100, 77), (70, 576)])
def test_a_product_has_the_bits_of_one_with_what_is_unpacked(
    num_outputs: int, num_inputs: int, form: tuple[Bits, int, bool, torch.dtype], dtype: torch.dtype
) -> None:
    weight = random_weight(num_outputs, num_inputs, form, dtype)
    for kernels in KERNELS:
        for num_rows in (1, 2, 7, 16, 17, 33, 131, 200):
            assert_same_products(weight, kernels, num_rows)


@settings(max_examples=150, deadline=None)
@given(
    num_outputs=st.integers(1, 150),
    num_inputs=st.integers(1, 150),
    num_rows=st.integers(1, 200),
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from(DTYPES),
    kernels=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**32),
)
def test_a_product_of_any_shape_has_those_bits(
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    form: tuple[Bits, int, bool, torch.dtype],
    dtype: torch.dtype,
    kernels: Kernels,
    seed: int,
) -> None:
    assert_same_products(random_weight(num_outputs, num_inputs, form, dtype, seed), kernels, num_rows, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS[::3])
def test_a_row_has_the_same_bits_wherever_it_stands(
    form: tuple[Bits, int, bool, torch.dtype], dtype: torch.dtype
) -> None:
    weight = random_weight(100, 300, form, dtype)
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    compiled = KERNELS[1:]
    alone = torch.cat([compiled[0].linear(row[None], compiled[0].pack_quantised(weight)) for row in x])
    for kernels in compiled:
        packed = kernels.pack_quantised(weight)
        for start, count in [(0, 200), (1, 2), (2, 7), (5, 16), (3, 64), (60, 33)]:
            assert torch.equal(kernels.linear(x[start : start + count], packed), alone[start : start + count])


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_at_the_ends_of_float16_are_read_as_they_are(bits: Bits) -> None:
    """Zeros of either sign, numbers below the normal ones, the largest."""
    values = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1023 * 2.0**-24, 65504.0, -65504.0] * 4)
    scales = values.half()[:, None]
    for minimums in (None, scales.flip(0)):
        first = 0 if bits == 4 and minimums is not None else -8
        codes = (torch.arange(32 * 32) % 16 + first).view(32, 32).to(torch.int8)
        for dtype in DTYPES:
            weight = QuantisedWeight(codes, scales, minimums, bits, 32, dtype)
            assert torch.equal(weight.unpacked(), rounded_by_hand(weight))
            for kernels in KERNELS:
                assert_same_products(weight, kernels, 3)


def test_what_is_no_number_reaches_its_own_outputs_alone() -> None:
    weight = random_weight(40, 64, (4, 32, True, torch.float32), torch.bfloat16)
    weight.scales[5, 0] = torch.nan
    assert weight.minimums is not None
    weight.minimums[17, 1] = torch.inf
    for kernels in KERNELS:
        out = kernels.linear(torch.randn(3, 64).bfloat16(), kernels.pack_quantised(weight))
        wrong = ~out.isfinite()
        assert wrong[:, [5, 17]].all()
        assert wrong.sum() == 6


def test_what_torch_computes_between_two_products_changes_nothing() -> None:
    """It uses the CPU's matrix tiles too, in the same thread, and leaves them as it likes."""
    weight = random_weight(64, 64, (4, 32, True, torch.float16), torch.bfloat16)
    x = torch.randn(3, 64).bfloat16()
    for kernels in KERNELS[1:]:
        for packed in (kernels.pack(weight.unpacked()), kernels.pack_quantised(weight)):
            expected = kernels.linear(x, packed)
            for size in (16, 64, 256):
                torch.mm(torch.randn(16, size).bfloat16(), torch.randn(size, size).bfloat16())
                assert torch.equal(kernels.linear(x, packed), expected)
