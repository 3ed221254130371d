"""Quantised weights: what they unpack to, and products with them.

With rows of floats those have the bits of products with what is unpacked. With rows of bfloat16 they are computed in
whole numbers, and have the reference's bits on every kind of CPU: the builds for others are run here.

Shapes: T rows, O outputs, C inputs, G groups.
"""

from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.kernel_sets import CPU_BUILDS, KernelSet
from torch import Tensor

from kvrelay.kernels.base import Kernels, QuantisedWeight
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import NUMBER_BITS, SHARED, ReferenceKernels

Bits = Literal[4, 8]

THREADS = (1, 2, 3)
DTYPES = (torch.float32, torch.bfloat16)
# bits, inputs of a group, whether there are minimums, dtype of scales
FORMS = list(product((4, 8), (16, 32), (False, True), (torch.float16, torch.float32)))
REFERENCE = ReferenceKernels()
COMPILED: list[Kernels] = [CpuKernels(count) for count in THREADS]
KERNELS: list[Kernels] = [REFERENCE, *COMPILED]
ROWS = (1, 2, 5, 7, 16, 33, 131)


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


def rounded_by_hand(weight: QuantisedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """In float64, where nothing is lost, rounded to float32 and then to the weight's dtype; float64: not rounded."""
    out = np.empty(weight.shape, np.float64)
    for o, c in np.ndindex(*weight.shape):
        scale, code = float(weight.scales[o, c // weight.group]), int(weight.codes[o, c])
        minimum = 0.0 if weight.minimums is None else float(weight.minimums[o, c // weight.group])
        out[o, c] = code * scale + minimum
    return (
        torch.from_numpy(out) if dtype == torch.float64 else torch.from_numpy(out.astype(np.float32)).to(weight.dtype)
    )


def random_rows(num_rows: int, num_inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of which some elements are much larger than others, as a model's are."""
    generator = torch.Generator().manual_seed(seed)
    x, sizes = torch.randn(2, num_rows, num_inputs, generator=generator)
    return (x * (3 * sizes).exp2()).to(dtype)


def assert_same_products(weight: QuantisedWeight, kernels: Kernels, num_rows: int, seed: int = 0) -> None:
    num_outputs, num_inputs = weight.shape
    x = random_rows(num_rows, num_inputs, weight.dtype, seed)
    bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
    if weight.dtype == torch.bfloat16:
        packed, expected = kernels.pack_quantised(weight), REFERENCE.pack_quantised(weight)
        assert torch.equal(kernels.linear(x, packed), REFERENCE.linear(x, expected))
        assert torch.equal(kernels.linear(x, packed, bias), REFERENCE.linear(x, expected, bias))
        return
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (8, 48), (331, 48), (100, 77), (70, 576)])
def test_a_product_of_floats_has_the_bits_of_one_with_what_is_unpacked(
    num_outputs: int, num_inputs: int, form: tuple[Bits, int, bool, torch.dtype]
) -> None:
    weight = random_weight(num_outputs, num_inputs, form, torch.float32)
    for kernels in KERNELS:
        for num_rows in (1, 2, 7, 16, 17, 33, 131, 200):
            assert_same_products(weight, kernels, num_rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (8, 48), (331, 48), (100, 77), (70, 576)])
def test_a_product_of_bfloat16_has_the_references_bits(
    num_outputs: int, num_inputs: int, form: tuple[Bits, int, bool, torch.dtype]
) -> None:
    weight = random_weight(num_outputs, num_inputs, form, torch.bfloat16)
    x = random_rows(max(ROWS), num_inputs, torch.bfloat16)
    bias = torch.randn(num_outputs).bfloat16()
    expected = REFERENCE.linear(x, REFERENCE.pack_quantised(weight), bias)
    for kernels in COMPILED:
        packed = kernels.pack_quantised(weight)
        for num_rows in ROWS:
            assert torch.equal(kernels.linear(x[:num_rows], packed, bias), expected[:num_rows])


@pytest.fixture(scope="module", params=CPU_BUILDS, ids=lambda kernel_set: kernel_set.name)
def build(request: pytest.FixtureRequest) -> Kernels:
    kernel_set: KernelSet = request.param
    return kernel_set.make()


def test_every_kind_of_cpu_has_the_references_bits(build: Kernels) -> None:
    for form in FORMS:
        weight = random_weight(70, 173, form, torch.bfloat16)
        for num_rows in (1, 3, 9, 40):
            assert_same_products(weight, build, num_rows)


def by_hand(weight: QuantisedWeight, row: list[float]) -> list[float]:
    """A row's products in Python's own whole numbers, and numpy's float32 between them."""
    out = []
    for o in range(weight.shape[0]):
        total = np.float32(0)
        for g in range(weight.scales.shape[1]):
            inputs = range(g * weight.group, min((g + 1) * weight.group, len(row)))
            first = g * weight.group // SHARED * SHARED
            largest = max(abs(x) for x in row[first : first + SHARED])
            power = 2.0 ** (int(np.frexp(largest)[1]) - NUMBER_BITS)  # 2^13 to 2^14 times this is the largest
            numbers = [round(row[i] / power) for i in inputs]
            products = sum(int(weight.codes[o, i]) * n for i, n in zip(inputs, numbers, strict=True))
            part = np.float32(float(weight.scales[o, g])) * (np.float32(products) * np.float32(power))
            if weight.minimums is not None:
                part += np.float32(float(weight.minimums[o, g])) * (np.float32(sum(numbers)) * np.float32(power))
            total += part
        out.append(float(total))
    return out


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_computes_what_is_written(form: tuple[Bits, int, bool, torch.dtype]) -> None:
    weight = random_weight(6, 77, form, torch.bfloat16)
    x = random_rows(3, 77, torch.bfloat16)
    expected = torch.tensor([by_hand(weight, row) for row in x.double().tolist()]).bfloat16()
    assert torch.equal(REFERENCE.linear(x, REFERENCE.pack_quantised(weight)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_as_near_as_its_rounding_to_bfloat16_lets_it_be(form: tuple[Bits, int, bool, torch.dtype]) -> None:
    """Rounding rows and values costs next to nothing, though some elements of a row are a hundred times others."""
    weight = random_weight(64, 576, form, torch.bfloat16)
    x = random_rows(16, 576, torch.bfloat16)
    exact = x.double() @ rounded_by_hand(weight, torch.float64).T
    found = REFERENCE.linear(x, REFERENCE.pack_quantised(weight)).double()
    assert (found - exact).norm() < 1.02 * (exact.bfloat16().double() - exact).norm()


@pytest.mark.parametrize("kernels", KERNELS, ids=["reference", *map(str, THREADS)])
def test_rows_at_the_ends_of_what_a_float_holds_are_rounded_as_the_reference_says(kernels: Kernels) -> None:
    """Zeros of either sign, numbers below the normal ones, the largest; and the largest beside the smallest."""
    weight = random_weight(20, 96, (4, 32, True, torch.float16), torch.bfloat16)
    for values in ([0.0, -0.0], [1e-40, -9e-41], [1e-38, 3e-39], [3.3895e38, -3.3895e38], [3e38, 1e-40], [1.0, 1e-30]):
        x = torch.tensor(values * 48).bfloat16().repeat(3, 1)
        x[1, 32:] = 1.0
        expected = REFERENCE.linear(x, REFERENCE.pack_quantised(weight))
        found = kernels.linear(x, kernels.pack_quantised(weight))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_value_that_is_no_number_gives_none_and_leaves_the_others(bad: float) -> None:
    weight = random_weight(40, 64, (8, 16, False, torch.float16), torch.bfloat16)
    for num_rows in (3, 20):
        x = random_rows(num_rows, 64, torch.bfloat16)
        good = REFERENCE.linear(x, REFERENCE.pack_quantised(weight))
        x[1, 40] = bad
        for kernels in KERNELS:
            out = kernels.linear(x, kernels.pack_quantised(weight))
            assert out[1].isnan().all()
            assert torch.equal(out[0], good[0])
            assert torch.equal(out[2:], good[2:])


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
    x = random_rows(200, 300, dtype)
    for kernels in KERNELS:
        packed = kernels.pack_quantised(weight)
        alone = torch.cat([kernels.linear(row[None], packed) for row in x])
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
    for kernels in COMPILED:
        for packed in (kernels.pack(weight.unpacked()), kernels.pack_quantised(weight)):
            expected = kernels.linear(x, packed)
            for size in (16, 64, 256):
                torch.mm(torch.randn(16, size).bfloat16(), torch.randn(size, size).bfloat16())
                assert torch.equal(kernels.linear(x, packed), expected)
