"""Every set of kernels computes what the plain formulas say, with bits that depend on nothing else.

Shapes: T tokens, S sequences, H heads, K KV heads, D head dim, N blocks, B block size, C input and O output features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvrelay.kernels.base import Activation, AttentionBatch, Kernels
from kvrelay.kernels.cpu.kernels import CpuKernels
from kvrelay.kernels.reference import ReferenceKernels

THREADS = (1, 2, 3, 7)
PLACES = ((0, 201), (1, 2), (2, 7), (5, 16), (60, 33))  # first row and number of rows, of 201


class AsManyThreadsAsTorch:
    """Compiled kernels on torch's number of threads."""

    def __init__(self) -> None:
        self._kernels = {count: CpuKernels(count) for count in THREADS}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels[torch.get_num_threads()], name)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return ReferenceKernels() if request.param == "reference" else cast(Kernels, AsManyThreadsAsTorch())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_bits_anywhere(compute: Callable[[slice], Tensor]) -> Tensor:
    """What `compute` makes of 201 rows one by one, having seen that it makes the same of them together."""
    with num_threads(1):
        alone = torch.cat([compute(slice(i, i + 1)) for i in range(201)])
    for threads in THREADS:
        with num_threads(threads):
            for start, count in PLACES:
                rows = slice(start, start + count)
                assert torch.equal(compute(rows), alone[rows])
    return alone


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
    kernels: Kernels, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    packed = kernels.pack(torch.randn(num_outputs, num_inputs).to(dtype))
    x = torch.randn(101, num_inputs).to(dtype)
    with num_threads(1):
        alone = torch.cat([kernels.linear(row[None], packed) for row in x])
    for threads in THREADS:
        with num_threads(threads):
            for start, count in [(0, 101), (1, 2), (2, 7), (5, 16), (3, 64), (60, 33)]:
                assert torch.equal(kernels.linear(x[start : start + count], packed), alone[start : start + count])


@pytest.mark.parametrize("size", [1, 6, 12, 20, 48, 128, 577, 4097])
def test_rms_norm_has_unit_mean_square_and_the_same_bits_in_any_batch(kernels: Kernels, size: int) -> None:
    x, weight = 3 * torch.randn(201, size), torch.randn(size)
    alone = assert_same_bits_anywhere(lambda rows: kernels.rms_norm(x[rows], weight, 1e-5))
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_takes_weights_wider_than_its_input(kernels: Kernels) -> None:
    x, weight = torch.randn(9, 48).bfloat16(), 1 + 1e-3 * torch.randn(48)
    out = kernels.rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, kernels.rms_norm(x.float(), weight, 1e-6).bfloat16())


@pytest.mark.parametrize("size", [1, 6, 12, 20, 48, 577, 4097])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(False, False), (True, False), (True, True)])
def test_layer_norm_has_zero_mean_and_unit_variance_and_the_same_bits_in_any_batch(
    kernels: Kernels, size: int, with_weight: bool, with_bias: bool
) -> None:
    x = 3 * torch.randn(201, size) + 2
    weight = torch.randn(size) if with_weight else None
    bias = torch.randn(size) if with_bias else None
    alone = assert_same_bits_anywhere(lambda rows: kernels.layer_norm(x[rows], weight, bias, 1e-5))
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    expected = expected * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-4)
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
    kernels: Kernels, activation: Activation, size: int
) -> None:
    gate, up = 4 * torch.randn(201, size), torch.randn(201, size)
    gate[7] = -200.0  # exp overflows
    alone = assert_same_bits_anywhere(lambda rows: kernels.activate(gate[rows], activation, up[rows]))
    plain = assert_same_bits_anywhere(lambda rows: kernels.activate(gate[rows], activation))
    expected = ACTIVATIONS[activation](gate.double())
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(alone.double(), expected * up.double(), rtol=1e-5, atol=5e-6)
    rounded = kernels.activate(gate.bfloat16(), activation, up.bfloat16())
    assert torch.equal(rounded, kernels.activate(gate.bfloat16().float(), activation, up.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("num_pairs", [6, 4, 1])
def test_rotary_turns_each_pair_by_its_angle_and_leaves_the_rest(kernels: Kernels, num_pairs: int) -> None:
    x, angles = torch.randn(201, 3, 12), 10 * torch.rand(201, num_pairs)
    alone = assert_same_bits_anywhere(lambda rows: kernels.rotary(x[rows], angles[rows].cos(), angles[rows].sin()))
    first, second = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    turned = torch.complex(first, second).to(torch.complex128) * torch.exp(1j * angles.double())[:, None]
    expected = torch.cat([turned.real, turned.imag, x[..., 2 * num_pairs :].double()], -1)
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-5)


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


def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(kernels: Kernels) -> None:
    pool = torch.zeros(3, 1, 2, 2, 4, 6)
    k = torch.ones(2, 2, 6)
    with pytest.raises(ValueError, match="12"):
        kernels.reshape_and_cache(k, k, pool[:, 0], torch.tensor([0, 12]))
    assert not pool.any()


# --- attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Texts:
    """Queries, keys and values of some sequences, and a pool in which the keys and values lie scattered."""

    shape: Shape
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    pool: Tensor
    block_tables: list[list[int]]

    @classmethod
    def random(cls, shape: Shape, lengths: list[int]) -> "Texts":
        def draw(heads: int) -> list[Tensor]:
            return [torch.randn(length, heads, shape.head_dim).to(shape.dtype) for length in lengths]

        queries, keys, values = draw(shape.num_heads), draw(shape.num_kv_heads), draw(shape.num_kv_heads)
        return cls.scattered(shape, queries, keys, values)

    @classmethod
    def scattered(cls, shape: Shape, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> "Texts":
        """Everything the sequences do not use is NaN."""
        counts = [-(-len(k) // shape.block_size) for k in keys]
        num_blocks = sum(counts) + 3
        free = torch.randperm(num_blocks).tolist()
        pool = torch.full(
            (num_blocks, 3, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), torch.nan, dtype=shape.dtype
        )
        tables = []
        for count, k, v in zip(counts, keys, values, strict=True):
            table = [free.pop() for _ in range(count)]
            for position in range(len(k)):
                block, offset = table[position // shape.block_size], position % shape.block_size
                pool[block, 1, 0, :, offset], pool[block, 1, 1, :, offset] = k[position], v[position]
            tables.append(table)
        return cls(shape, queries, keys, values, pool, tables)

    def attend(self, kernels: Kernels, ranges: list[tuple[int, int, int]], num_padding: int = 0) -> list[Tensor]:
        """Run positions [start, end) of sequence s for each (s, start, end), in one call; one output for each."""
        width = max(len(self.block_tables[s]) for s, _, _ in ranges)
        tables = torch.tensor([self.block_tables[s] + [-1] * (width - len(self.block_tables[s])) for s, _, _ in ranges])
        counts = [end - start for _, start, end in ranges]
        starts = torch.tensor([0, *counts]).cumsum(0)
        batch = AttentionBatch(starts, torch.tensor([end for _, _, end in ranges]), tables)
        q = torch.cat([self.queries[s][start:end] for s, start, end in ranges])
        q = torch.cat([q, torch.full((num_padding, *q.shape[1:]), torch.nan).to(q)])
        shape = self.shape
        out = kernels.paged_attention(
            q, self.pool[:, 1], batch, scale=shape.scale, window=shape.window, softcap=shape.softcap
        )
        assert not out[sum(counts) :].any()
        return list(out[: sum(counts)].split(counts))

    def expected(self, s: int) -> Tensor:
        """The formula, for every position of sequence s, in float64."""
        shape, length = self.shape, len(self.keys[s])
        group = shape.num_heads // shape.num_kv_heads
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (self.keys[s], self.values[s]))
        scores = torch.einsum("qhd,khd->hqk", self.queries[s].double(), k) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | ((distance >= shape.window) if shape.window else torch.tensor(False))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


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
def test_attention_is_the_formula_for_prompts_chunks_and_single_tokens(kernels: Kernels, shape: Shape) -> None:
    texts = Texts.random(shape, [1, 3, 17, 64, 65, 150, 200, 300])
    ranges = [(0, 0, 1), (1, 2, 3), (2, 0, 17), (3, 60, 64), (4, 64, 65), (5, 0, 150), (6, 199, 200), (7, 100, 300)]
    tolerance = 2e-5 if shape.dtype == torch.float32 else 2e-2
    for (s, start, end), out in zip(ranges, texts.attend(kernels, ranges, num_padding=3), strict=True):
        torch.testing.assert_close(out.double(), texts.expected(s)[start:end], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", THREADS)
def test_attention_bits_do_not_depend_on_chunks_neighbours_blocks_or_threads(
    kernels: Kernels, shape: Shape, threads: int
) -> None:
    length = 150
    texts = Texts.random(shape, [length, 40, 500, 33])
    with num_threads(1):
        (whole,) = texts.attend(kernels, [(0, 0, length)])
    with num_threads(threads):
        for cuts in ([1, 2, 9], [16, 64, 128], [63, 65, 149], list(range(90, 110))):
            edges = [0, *cuts, length]
            for start, end in pairwise(edges):
                (alone,) = texts.attend(kernels, [(0, start, end)])
                among = texts.attend(kernels, [(1, 0, 40), (2, 499, 500), (0, start, end), (3, 32, 33)], num_padding=2)
                assert torch.equal(alone, whole[start:end])
                assert torch.equal(among[2], whole[start:end])
        for block_size in (1, 5, 32):
            other = Shape(**{**shape.__dict__, "block_size": block_size})
            moved = Texts.scattered(other, texts.queries, texts.keys, texts.values)
            assert torch.equal(moved.attend(kernels, [(0, 0, length)])[0], whole)


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
