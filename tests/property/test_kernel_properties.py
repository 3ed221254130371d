"""Whatever the shapes, every set of kernels computes what the reference does."""

from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.attention import Shape, Texts
from support.kernel_sets import KERNEL_SETS, KernelSet

from kvrelay.kernels.base import Kernels

REFERENCE = KERNEL_SETS[0].make()

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_kv_heads = draw(st.integers(1, 3))
    return Shape(
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 7, 17])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([1, 6, 16, 33, 80, 128])),
        block_size=draw(st.integers(1, 40)),
        window=draw(st.sampled_from([0, 0, 1, 2, 63, 64, 65, 255, 256, 257]) | st.integers(1, 600)),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        dtype=draw(dtypes),
    )


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    """Positions of the queries of one sequence, most often its last alone."""
    end = draw(st.integers(1, 600) | st.sampled_from([1, 63, 64, 65, 255, 256, 257, 511, 512, 513]))
    return end - draw(st.integers(1, min(end, 4)) | st.just(1)), end


@pytest.fixture(params=KERNEL_SETS[1:], ids=lambda kernel_set: kernel_set.name)
def kernel_set(request: pytest.FixtureRequest) -> KernelSet:
    return cast(KernelSet, request.param)


@pytest.fixture
def kernels(kernel_set: KernelSet) -> Kernels:
    return kernel_set.make()


def settings_for(num_interpreted: int) -> settings:
    """For examples that take an interpreted set tens of milliseconds each."""
    return settings(
        max_examples=num_interpreted, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@settings_for(25)
@given(shape=shapes(), parts=st.lists(ranges(), min_size=1, max_size=3), num_padding=st.integers(0, 17), seed=seeds)
def test_attention_over_random_shapes(
    kernels: Kernels, shape: Shape, parts: list[tuple[int, int]], num_padding: int, seed: int
) -> None:
    torch.manual_seed(seed)
    texts = Texts.random(shape, [end for _, end in parts])
    asked = [(s, start, end) for s, (start, end) in enumerate(parts)]
    tolerance = 2e-5 if shape.dtype == torch.float32 else 2e-2
    expected = texts.attend(REFERENCE, asked, num_padding)
    for out, wanted in zip(texts.attend(kernels, asked, num_padding), expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


@settings_for(40)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(1, 20)),
    dtype=dtypes,
    seed=seeds,
    data=st.data(),
)
def test_the_cache_over_random_shapes(
    kernels: Kernels, sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    num_blocks, num_kv_heads, head_dim, block_size = sizes
    slots = data.draw(st.lists(st.integers(0, num_blocks * block_size - 1), max_size=9, unique=True))
    slots += [-1] * data.draw(st.integers(0, 3))
    slots = data.draw(st.permutations(slots))
    torch.manual_seed(seed)
    # Keys and values as parts of one wider product, layers between those of other layers.
    k, v = torch.randn(len(slots), 2 * num_kv_heads + 1, head_dim).to(dtype).split([num_kv_heads, num_kv_heads + 1], 1)
    pool = torch.randn(num_blocks, 2, 2, num_kv_heads, block_size, head_dim).to(dtype)
    expected = pool.clone()
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    REFERENCE.reshape_and_cache(k, v[:, 1:], expected[:, 1], slot_mapping)
    kernels.reshape_and_cache(k, v[:, 1:], pool[:, 1], slot_mapping)
    assert torch.equal(pool, expected)


@settings_for(40)
@given(
    num_rows=st.integers(0, 5),
    size=st.integers(1, 300) | st.sampled_from([4095, 4096, 4097, 9000]),
    spare=st.integers(0, 3),
    dtypes=st.sampled_from([(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]),
    seed=seeds,
)
def test_rms_norm_over_random_shapes(
    kernels: Kernels, num_rows: int, size: int, spare: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    torch.manual_seed(seed)
    x = 3 * torch.randn(num_rows, size + spare).to(dtypes[0])[:, :size]  # rows of a wider product
    weight = torch.randn(size).to(dtypes[1])
    tolerance = 1e-5 if dtypes[0] == torch.float32 else 2**-7
    out, expected = kernels.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-6)
