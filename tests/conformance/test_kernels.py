"""Every set of kernels computes what the plain formulas say, with bits that depend on nothing else.

Shapes: T tokens, S sequences, H heads, K KV heads, D head dim, N blocks, B block size, C input and O output features.
"""

from collections.abc import Callable
from itertools import pairwise, product
from typing import cast

import pytest
import torch
from support.attention import Shape, Texts
from support.kernel_sets import KERNEL_SETS, KernelSet, num_threads
from torch import Tensor

from kvrelay.kernels.base import Activation, Kernels

PLACES = ((0, 201), (1, 2), (2, 7), (5, 16), (60, 33))  # first row and number of rows, of 201


@pytest.fixture(params=KERNEL_SETS, ids=lambda kernel_set: kernel_set.name)
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    return cast(KernelSet, request.param)


@pytest.fixture
def kernels(kernel_set: KernelSet) -> Kernels:
    return kernel_set.make()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


def assert_same_bits_anywhere(kernel_set: KernelSet, compute: Callable[[slice], Tensor]) -> Tensor:
    """What `compute` makes of 201 rows, having seen that it makes the same of them one by one and in other batches."""
    with num_threads(1):
        together = compute(slice(201))
        for i in range(0, 201, 25 if kernel_set.is_interpreted else 1):
            assert torch.equal(compute(slice(i, i + 1)), together[i : i + 1])
    for threads in kernel_set.threads:
        with num_threads(threads):
            for start, count in PLACES:
                rows = slice(start, start + count)
                assert torch.equal(compute(rows), together[rows])
    return together


# --- products, norms, rotary, activation ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (8, 48), (331, 48), (100, 77), (192, 576)])
def test_linear_is_the_product_with_the_transposed_weight(
    kernels: Kernels, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(37, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype)
    expected = x.double() @ weight.double().T
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-1}
    packed = kernels.pack(weight)
    torch.testing.assert_close(kernels.linear(x, packed).double(), expected, **tolerance)
    torch.testing.assert_close(kernels.linear(x, packed, bias).double(), expected + bias.double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_inputs", [24, 77, 576, 1537])
@pytest.mark.parametrize("num_outputs", [1, 8, 17, 20, 40, 100, 331])
def test_a_row_of_a_product_has_the_same_bits_wherever_it_stands(
    kernels: Kernels, kernel_set: KernelSet, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    packed = kernels.pack(torch.randn(num_outputs, num_inputs).to(dtype))
    x = torch.randn(101, num_inputs).to(dtype)
    with num_threads(1):
        alone = torch.cat([kernels.linear(row[None], packed) for row in x])
    for threads in kernel_set.threads:
        with num_threads(threads):
            for start, count in [(0, 101), (1, 2), (2, 7), (5, 16), (3, 64), (60, 33)]:
                assert torch.equal(kernels.linear(x[start : start + count], packed), alone[start : start + count])


@pytest.mark.parametrize("size", [1, 6, 12, 20, 48, 128, 577, 4097])
def test_rms_norm_has_unit_mean_square_and_the_same_bits_in_any_batch(
    kernels: Kernels, kernel_set: KernelSet, size: int
) -> None:
    x, weight = 3 * torch.randn(201, size), torch.randn(size)
    out = assert_same_bits_anywhere(kernel_set, lambda rows: kernels.rms_norm(x[rows], weight, 1e-5))
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_takes_weights_wider_than_its_input(kernels: Kernels, kernel_set: KernelSet) -> None:
    x, weight = torch.randn(9, 48).bfloat16(), 1 + 1e-3 * torch.randn(48)
    out, expected = kernels.rms_norm(x, weight, 1e-6), kernels.rms_norm(x.float(), weight, 1e-6).bfloat16()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2**-7 if kernel_set.is_interpreted else 0, atol=0)


@pytest.mark.parametrize("size", [1, 6, 12, 20, 48, 577, 4097])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(False, False), (True, False), (True, True)])
def test_layer_norm_has_zero_mean_and_unit_variance_and_the_same_bits_in_any_batch(
    kernels: Kernels, kernel_set: KernelSet, size: int, with_weight: bool, with_bias: bool
) -> None:
    x = 3 * torch.randn(201, size) + 2
    weight = torch.randn(size) if with_weight else None
    bias = torch.randn(size) if with_bias else None
    out = assert_same_bits_anywhere(kernel_set, lambda rows: kernels.layer_norm(x[rows], weight, bias, 1e-5))
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    expected = expected * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = kernels.layer_norm(x.bfloat16(), weight, bias, 1e-5)
    assert torch.equal(rounded, kernels.layer_norm(x.bfloat16().float(), weight, bias, 1e-5).bfloat16())


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.clamp(min=0).square(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 7, 88, 577, 1531])
def test_an_activation_is_its_formula_with_the_same_bits_in_any_batch(
    kernels: Kernels, kernel_set: KernelSet, activation: Activation, size: int
) -> None:
    gate, up = 4 * torch.randn(201, size), torch.randn(201, size)
    gate[7] = -200.0  # exp overflows
    out = assert_same_bits_anywhere(kernel_set, lambda rows: kernels.activate(gate[rows], activation, up[rows]))
    plain = assert_same_bits_anywhere(kernel_set, lambda rows: kernels.activate(gate[rows], activation))
    expected = ACTIVATIONS[activation](gate.double())
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(out.double(), expected * up.double(), rtol=1e-5, atol=5e-6)
    rounded = kernels.activate(gate.bfloat16(), activation, up.bfloat16())
    assert torch.equal(rounded, kernels.activate(gate.bfloat16().float(), activation, up.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("num_pairs", [6, 4, 1])
def test_rotary_turns_each_pair_by_its_angle_and_leaves_the_rest(
    kernels: Kernels, kernel_set: KernelSet, num_pairs: int
) -> None:
    x, angles = torch.randn(201, 3, 12), 10 * torch.rand(201, num_pairs)
    out = assert_same_bits_anywhere(
        kernel_set, lambda rows: kernels.rotary(x[rows], angles[rows].cos(), angles[rows].sin())
    )
    first, second = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    turned = torch.complex(first, second).to(torch.complex128) * torch.exp(1j * angles.double())[:, None]
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * num_pairs :].double()], -1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


# --- the cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_land_in_their_slots_of_one_layer_only(kernels: Kernels, dtype: torch.dtype) -> None:
    num_blocks, num_layers, num_kv_heads, block_size, head_dim = 5, 3, 2, 4, 6
    pool = torch.zeros(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    k, v = torch.randn(3, num_kv_heads, head_dim).to(dtype), torch.randn(3, num_kv_heads, head_dim).to(dtype)
    kernels.reshape_and_cache(k, v, pool[:, 1], torch.tensor([6, 19, 0]))
    expected = torch.zeros_like(pool)
    for row, (block, offset) in enumerate([(1, 2), (4, 3), (0, 0)]):
        expected[block, 1, 0, :, offset], expected[block, 1, 1, :, offset] = k[row], v[row]
    assert torch.equal(pool, expected)


def test_a_padding_slot_writes_nothing(kernels: Kernels) -> None:
    """G06: -1 must not count from the end, where the last block's last slot is somebody's."""
    pool = torch.randn(3, 2, 2, 2, 4, 6)
    before = pool.clone()
    k = torch.full((4, 2, 6), torch.inf)
    kernels.reshape_and_cache(k, k, pool[:, 0], torch.tensor([-1, -1, -1, -1]))
    assert torch.equal(pool, before)
    kernels.reshape_and_cache(k, k, pool[:, 0], torch.tensor([-1, 5, -1, -1]))
    before[1, 0, :, :, 1] = torch.inf
    assert torch.equal(pool, before)


def test_a_slot_outside_the_pool_is_never_written(kernels: Kernels, kernel_set: KernelSet) -> None:
    memory = torch.zeros(5, 1, 2, 2, 4, 6)
    expected = memory.clone()
    pool, k, slots = memory[1:4, 0], torch.ones(3, 2, 6), torch.tensor([2, 12, 2**40])
    if kernel_set.refuses_slots:
        with pytest.raises(ValueError, match=str(2**40)):
            kernels.reshape_and_cache(k, k, pool, slots)
    else:
        kernels.reshape_and_cache(k, k, pool, slots)
        expected[1, 0, :, :, 2] = 1
    assert torch.equal(memory, expected)


# --- attention --------------------------------------------------------------------------------------------------


SHAPES = [
    Shape(6, 2, 12, 16),
    Shape(4, 4, 8, 1),
    Shape(9, 3, 64, 16),
    Shape(5, 1, 80, 24, window=9),
    Shape(40, 2, 6, 7, softcap=5.0),
    Shape(6, 2, 12, 16, window=70, softcap=20.0),
    Shape(6, 2, 16, 16, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_formula_for_prompts_chunks_and_single_tokens(
    kernels: Kernels, kernel_set: KernelSet, shape: Shape
) -> None:
    texts = Texts.random(shape, [1, 3, 17, 64, 65, 150, 200, 300])
    ranges = [(0, 0, 1), (1, 2, 3), (2, 0, 17), (3, 60, 64), (4, 64, 65), (5, 0, 150), (6, 199, 200), (7, 100, 300)]
    if kernel_set.is_interpreted:
        ranges[5], ranges[7] = (5, 147, 150), (7, 294, 300)
    tolerance = 2e-5 if shape.dtype == torch.float32 else 2e-2
    for (s, start, end), out in zip(ranges, texts.attend(kernels, ranges, num_padding=3), strict=True):
        torch.testing.assert_close(out.double(), texts.expected(s)[start:end], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_bits_do_not_depend_on_chunks_neighbours_blocks_or_threads(
    kernels: Kernels, kernel_set: KernelSet, shape: Shape
) -> None:
    first, length, block_sizes = 0, 150, (1, 5, 32)
    all_cuts = [[1, 2, 9], [16, 64, 128], [63, 65, 149], list(range(90, 110))]
    if kernel_set.is_interpreted:
        first, length, block_sizes = 252, 260, (5,)
        all_cuts = [[253, 257]]
    texts = Texts.random(shape, [length, 40, 500, 33])
    with num_threads(1):
        (whole,) = texts.attend(kernels, [(0, first, length)])
    for threads, cuts in product(kernel_set.threads, all_cuts):
        with num_threads(threads):
            for start, end in pairwise([first, *cuts, length]):
                (alone,) = texts.attend(kernels, [(0, start, end)])
                among = texts.attend(kernels, [(1, 35, 40), (2, 499, 500), (0, start, end), (3, 32, 33)], num_padding=2)
                assert torch.equal(alone, whole[start - first : end - first])
                assert torch.equal(among[2], whole[start - first : end - first])
    for threads, block_size in product(kernel_set.threads, block_sizes):
        other = Shape(**{**shape.__dict__, "block_size": block_size})
        moved = Texts.scattered(other, texts.queries, texts.keys, texts.values)
        with num_threads(threads):
            assert torch.equal(moved.attend(kernels, [(0, first, length)])[0], whole)


def test_a_nan_in_one_sequence_reaches_no_other(kernels: Kernels) -> None:
    shape = Shape(6, 2, 12, 16)
    texts = Texts.random(shape, [30, 30, 90])
    ranges = [(0, 29, 30), (1, 29, 30), (2, 50, 90)]
    clean = texts.attend(kernels, ranges)
    texts.pool[texts.block_tables[1][0]] = torch.nan
    spoiled = texts.attend(kernels, ranges)
    assert torch.equal(spoiled[0], clean[0])
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[2], clean[2])


# --- scanning logits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 17, 331, 4097])
def test_a_scan_finds_the_first_of_the_largest_and_whatever_is_not_finite(kernels: Kernels, size: int) -> None:
    x = torch.randn(9, size).round()  # full of equals
    x[3] = -torch.inf
    x[4, size // 2] = torch.inf
    x[5, -1] = torch.nan
    x[6] = torch.finfo(torch.float32).max
    largest, places, finite = kernels.scan(x)
    assert finite.tolist() == [True, True, True, False, False, False, True, True, True]
    for row in (0, 1, 2, 3, 4, 6, 7, 8):
        assert largest[row] == x[row].max()
        assert places[row] == (x[row] == x[row].max()).nonzero()[0, 0]
    for rows in (slice(0, 1), slice(2, 5)):
        for together, alone in zip((largest, places, finite), kernels.scan(x[rows]), strict=True):
            assert torch.equal(together[rows], alone)
