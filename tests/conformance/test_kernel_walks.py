"""Random shapes, strides and company: what a set of kernels computes is the formula, and a row's bits are its own.

The CPU's kernels are walked through for each kind of CPU that this one can stand for.

Shapes: T tokens, H heads, K KV heads, D head dim, C input and O output features.
"""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
import torch
from support.attention import Shape, Texts
from support.kernel_sets import CPU_BUILDS, KERNEL_SETS, KernelSet, num_threads
from torch import Tensor

from kvrelay.kernels.base import Activation, Kernels

# Rows with NaN and infinities are drawn on purpose; Triton's interpreter is numpy, which warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning")

WALKS = range(12)
DTYPES = (torch.float32, torch.bfloat16)
POISON = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture(params=KERNEL_SETS + CPU_BUILDS, ids=lambda kernel_set: kernel_set.name)
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    return cast(KernelSet, request.param)


@pytest.fixture
def kernels(kernel_set: KernelSet) -> Kernels:
    return kernel_set.make()


@pytest.fixture(params=WALKS)
def draw(request: pytest.FixtureRequest) -> random.Random:
    torch.manual_seed(request.param)
    return random.Random(request.param)


def tolerance_of(dtype: torch.dtype, float32: float = 2e-5) -> dict[str, float]:
    return {"rtol": float32, "atol": float32} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


def column_range(draw: random.Random, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of `size` random elements, a range of a wider buffer's columns."""
    before, after = draw.choice([(0, 0), (1, 0), (3, 5), (16, 1)])
    return torch.randn(num_rows, before + size + after).to(dtype)[:, before : before + size]


def assert_rows_are_their_own(
    draw: random.Random, kernel_set: KernelSet, num_rows: int, compute: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Rows computed by themselves, among others and on any number of threads have the same bits; so have those
    beside a row that is no number. Returns what all of them make."""
    with num_threads(1):
        whole = compute(x)
    assert len(whole) == num_rows
    for threads in kernel_set.threads:
        with num_threads(threads):
            assert torch.equal(compute(x), whole)
            for _ in range(3 if num_rows else 0):
                start = draw.randrange(num_rows)
                end = draw.choice([start + 1, draw.randint(start + 1, num_rows)])
                assert torch.equal(compute(x[start:end]), whole[start:end])
    if num_rows > 1:
        spoiled, row = x.clone(), draw.randrange(num_rows)
        spoiled[row] = draw.choice(POISON)
        others = torch.arange(num_rows) != row
        assert torch.equal(compute(spoiled)[others], whole[others])
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(kernels: Kernels, kernel_set: KernelSet, draw: random.Random, dtype: torch.dtype) -> None:
    num_rows = draw.choice([0, 1, draw.randint(2, 40), draw.randint(41, 300)])
    num_inputs, num_outputs = (
        draw.choice([1, 15, 33, 576, draw.randint(2, 1700)]),
        draw.choice([1, draw.randint(2, 400)]),
    )
    weight = column_range(draw, num_outputs, num_inputs, dtype)
    if draw.random() < 0.5:
        weight = weight.T.contiguous().T
    bias = torch.randn(num_outputs).to(dtype) if draw.random() < 0.5 else None
    x, packed = column_range(draw, num_rows, num_inputs, dtype), kernels.pack(weight)
    out = assert_rows_are_their_own(draw, kernel_set, num_rows, lambda x: kernels.linear(x, packed, bias), x)
    assert (out.shape, out.dtype) == ((num_rows, num_outputs), dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = num_inputs**0.5
    torch.testing.assert_close(out.double() / size, expected / size, **tolerance_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: Kernels, kernel_set: KernelSet, draw: random.Random, dtype: torch.dtype) -> None:
    num_rows, size = draw.choice([0, 1, draw.randint(2, 300)]), draw.choice([1, 16, draw.randint(2, 2000)])
    x = column_range(draw, num_rows, size, dtype)
    weight, bias = torch.randn(2, size).to(draw.choice([torch.float32, dtype]))
    rms = assert_rows_are_their_own(draw, kernel_set, num_rows, lambda x: kernels.rms_norm(x, weight, 1e-5), x)
    layer = assert_rows_are_their_own(
        draw, kernel_set, num_rows, lambda x: kernels.layer_norm(x, weight, bias, 1e-5), x
    )
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rms.double(), scaled * weight.double(), **tolerance_of(dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    if size > 2:  # of two elements that are nearly equal, the difference is mostly rounding
        expected = centred * weight.double() + bias.double()
        torch.testing.assert_close(layer.double(), expected, **tolerance_of(dtype, float32=1e-4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(kernels: Kernels, kernel_set: KernelSet, draw: random.Random, dtype: torch.dtype) -> None:
    num_rows, num_heads, head_dim = draw.choice([1, draw.randint(2, 200)]), draw.randint(1, 5), draw.randint(2, 256)
    num_pairs = draw.choice([head_dim // 2, draw.randint(1, head_dim // 2)])
    x = column_range(draw, num_rows, num_heads * head_dim, dtype).unflatten(-1, (num_heads, head_dim))
    angles = 10 * torch.rand(num_rows, num_pairs)
    out = kernels.rotary(x, angles.cos(), angles.sin())
    first, second = (x[..., i * num_pairs : (i + 1) * num_pairs].double() for i in (0, 1))
    cosines, sines = angles.cos().double()[:, None], angles.sin().double()[:, None]
    expected = [first * cosines - second * sines, second * cosines + first * sines, x[..., 2 * num_pairs :].double()]
    torch.testing.assert_close(out.double(), torch.cat(expected, -1), **tolerance_of(dtype))
    for threads in kernel_set.threads:
        with num_threads(threads):
            start = draw.randrange(num_rows)
            some = slice(start, draw.randint(start + 1, num_rows))
            assert torch.equal(kernels.rotary(x[some], angles[some].cos(), angles[some].sin()), out[some])


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.clamp(min=0).square(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(
    kernels: Kernels, kernel_set: KernelSet, draw: random.Random, activation: Activation, dtype: torch.dtype
) -> None:
    num_rows, size = draw.choice([0, 1, draw.randint(2, 200)]), draw.choice([1, 16, draw.randint(2, 700)])
    x = 5 * column_range(draw, num_rows, 2 * size, dtype)

    def gated(x: Tensor) -> Tensor:
        return kernels.activate(x[:, :size], activation, x[:, size:])

    out = assert_rows_are_their_own(draw, kernel_set, num_rows, gated, x)
    expected = ACTIVATIONS[activation](x[:, :size].double()) * x[:, size:].double()
    torch.testing.assert_close(out.double(), expected, **tolerance_of(dtype))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-30, 88.8, -88.8, 700.0, -700.0, 3e38, -3e38, torch.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_the_smallest_and_the_largest(kernels: Kernels, activation: Activation, value: float) -> None:
    out = kernels.activate(torch.full((2, 21), value), activation)
    expected = ACTIVATIONS[activation](torch.full((2, 21), value, dtype=torch.float64)).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-30)
    assert kernels.activate(torch.full((1, 3), torch.nan), activation).isnan().all()


def draw_shape(draw: random.Random, dtype: torch.dtype, longest: int, *, is_small: bool) -> Shape:
    num_kv_heads = draw.randint(1, 3)
    return Shape(
        num_heads=num_kv_heads * draw.choice([1, 2, 3, 4, 7] if is_small else [1, 2, 3, 4, 7, 8, 16, 17, 24]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([1, 16, 64, 128, draw.randint(2, 256)]),
        block_size=draw.choice([16, draw.randint(1, 64)]),
        window=draw.choice([0, 0, 1, 64, 256, draw.randint(2, 40), draw.randint(1, longest)]),
        softcap=draw.choice([0.0, 0.0, 2.0, 30.0]),
        dtype=dtype,
    )


def draw_ranges(draw: random.Random, *, is_small: bool) -> list[tuple[int, int, int]]:
    """(s, start, end) of some sequences: most decode one token, others are prompts' chunks; one may be long."""
    longest = 300 if is_small else draw.choice([300, 700, 2500])
    ranges = []
    for s in range(draw.randint(1, 5)):
        end = draw.choice([1, 16, 256, 257, draw.randint(2, 600), longest, longest])
        ranges.append((s, max(0, end - draw.choice([1, 1, draw.randint(1, 6 if is_small else 150)])), end))
    return ranges


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(kernels: Kernels, kernel_set: KernelSet, draw: random.Random, dtype: torch.dtype) -> None:
    is_small = kernel_set.is_interpreted
    ranges = draw_ranges(draw, is_small=is_small)
    shape = draw_shape(draw, dtype, max(end for _, _, end in ranges), is_small=is_small)
    texts = Texts.random(shape, [end for _, _, end in ranges])
    with num_threads(1):
        found = texts.attend(kernels, ranges, num_padding=draw.randint(0, 9))
    for (s, start, end), out in zip(ranges, found, strict=True):
        torch.testing.assert_close(out.double(), texts.expected(s, start, end), **tolerance_of(dtype))
    for threads in kernel_set.threads:
        with num_threads(threads):
            for again, out in zip(texts.attend(kernels, ranges), found, strict=True):
                assert torch.equal(again, out)
            (s, start, end), out = draw.choice(list(zip(ranges, found, strict=True)))
            edges = sorted({start, end, *(draw.randint(start, end) for _ in range(2))})
            chunks = [texts.attend(kernels, [(s, *piece)])[0] for piece in pairwise(edges)]
            assert torch.equal(torch.cat(chunks), out)
    s = draw.randrange(len(ranges))
    texts.pool[torch.tensor(texts.block_tables[s])] = draw.choice(POISON)
    for other, (again, out) in enumerate(zip(texts.attend(kernels, ranges), found, strict=True)):
        assert other == s or torch.equal(again, out)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 160])
def test_a_decoded_row_has_the_bits_of_its_prompts(kernel_set: KernelSet, group: int, head_dim: int) -> None:
    if kernel_set.is_interpreted:
        pytest.skip("it has one way for all rows")
    kernels, ends = kernel_set.make(), (1, 16, 17, 250, 257, 300)  # within sixteen keys, and where a split ends
    shapes = [Shape(2 * group, 2, head_dim, block_size, dtype=torch.bfloat16) for block_size in (16, 7, 48)]
    texts = Texts.random(shapes[0], [300])
    for shape in shapes:
        texts = Texts.scattered(shape, texts.queries, texts.keys, texts.values)
        [prompt] = texts.attend(kernels, [(0, 0, 300)])
        for end, row in zip(ends, texts.attend(kernels, [(0, end - 1, end) for end in ends]), strict=True):
            assert torch.equal(row[0], prompt[end - 1])


def test_no_rows_at_all(kernels: Kernels) -> None:
    texts = Texts.random(Shape(4, 2, 8, 16), [20, 30])
    assert [len(out) for out in texts.attend(kernels, [(0, 20, 20), (1, 30, 30)])] == [0, 0]
    before = texts.pool.clone()
    none = torch.empty(0, 2, 8)
    kernels.reshape_and_cache(none, none, texts.pool[:, 0], torch.empty(0, dtype=torch.int64))
    torch.testing.assert_close(texts.pool, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache(kernels: Kernels, draw: random.Random, dtype: torch.dtype) -> None:
    num_blocks, num_layers, num_kv_heads, block_size, head_dim = (draw.randint(1, most) for most in (9, 3, 3, 64, 130))
    pool = torch.randn(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim).to(dtype)
    expected, layer, num_slots = pool.clone(), draw.randrange(num_layers), num_blocks * block_size
    slots = draw.sample(range(num_slots), draw.randint(0, min(40, num_slots))) + [-1] * draw.randint(0, 3)
    draw.shuffle(slots)
    kv = torch.randn(len(slots), 2 * num_kv_heads + 1, head_dim).to(dtype)
    k, v = kv[:, :num_kv_heads], kv[:, num_kv_heads + 1 :]
    kernels.reshape_and_cache(k, v, pool[:, layer], torch.tensor(slots, dtype=torch.int64))
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected[block, layer, 0, :, offset], expected[block, layer, 1, :, offset] = k[row], v[row]
    assert torch.equal(pool, expected)
