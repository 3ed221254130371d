"""The model runner as the engine sees it: steps in, tokens out, one pool of KV."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forward import make_sequence
from support.kernel_sets import cpu_kernels
from support.requests import resident_bytes
from support.tiny_model import make_tiny_model

from kvrelay.engine.config import EngineConfig, parse_size
from kvrelay.engine.errors import ConfigError, Internal
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.model_info import read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.models.compiled import CompiledDecoder
from kvrelay.engine.shared_memory import SharedMemory
from kvrelay.engine.step import Executor, Row, RowResult, Scheduled

BAD_TOKEN = 200


def load(folder: Path, **config: Any) -> ModelRunner:
    return ModelRunner.load(read_model_info(folder), EngineConfig(**{"num_blocks": 40, "threads": 1, **config}))


def num_sampled(result: RowResult) -> int:
    assert isinstance(result, Row)
    return len(result.sampled)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in which one token's embedding is NaN."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["auto", "reference"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[ModelRunner]:
    runner = load(folder, kernels=request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize(("choice", "names"), [("auto", {"cpu", "reference"}), ("reference", {"reference"})])
def test_the_log_names_the_kernels_that_run(
    folder: Path, caplog: pytest.LogCaptureFixture, choice: str, names: set[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="kvrelay"):
        runner = load(folder, kernels=choice)
    runner.close()
    (record,) = [record for record in caplog.records if record.message == "model_loaded"]
    assert record.kvrelay_fields["kernels"] == runner.kernels_name
    assert runner.kernels_name in names


@pytest.mark.parametrize(("kernels", "num_threads"), [("auto", 1), ("reference", 2)])
def test_torch_has_threads_only_where_it_computes(folder: Path, kernels: str, num_threads: int) -> None:
    """Beside the compiled kernels' team a second one would wait on the same cores."""
    if kernels == "auto":
        cpu_kernels(1)  # or the test is skipped
    before = torch.get_num_threads()
    try:
        runner = load(folder, kernels=kernels, threads=2)
        runner.close()
        assert torch.get_num_threads() == num_threads
        assert runner.num_threads == 2
    finally:
        torch.set_num_threads(before)


def test_no_step_makes_room_that_loading_could_have_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_kernels(1)  # or the test is skipped
    runner = load(folder, max_num_seqs=20, max_num_batched_tokens=60)
    monkeypatch.setattr(CompiledDecoder, "reserve", None)
    monkeypatch.setattr(CompiledDecoder, "_make_head", None)
    many = [make_sequence(range(i, i + 3), [i], prompt_logprobs=1) for i in range(20)]
    results = runner.execute([Scheduled(sequence, 0, 3) for sequence in many])
    runner.close()
    assert [num_sampled(result) for result in results] == [1] * 20


def test_it_is_an_executor_with_the_models_layout(runner: ModelRunner) -> None:
    executor: Executor = runner
    assert executor.layout == KVLayout(num_layers=3, num_kv_heads=2, head_dim=12, block_size=16, dtype="float32")
    assert executor.num_blocks == 40
    assert executor.execute([]) == []
    assert runner.max_model_len == 128


def test_only_rows_that_reach_their_end_have_a_token(runner: ModelRunner) -> None:
    part, whole = make_sequence(range(30), [0, 1]), make_sequence(range(5), [2])
    results = runner.execute([Scheduled(part, 0, 10), Scheduled(whole, 0, 5)])
    assert results[0] == Row()
    assert num_sampled(results[1]) == 1
    assert runner.execute([Scheduled(part, 10, 29)]) == [Row()]
    assert num_sampled(runner.execute([Scheduled(part, 29, 30)])[0]) == 1


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 4}], ids=["greedy", "seeded"]
)
def test_tokens_and_kv_are_the_same_alone_in_chunks_and_in_company(
    runner: ModelRunner, sampling: dict[str, Any]
) -> None:
    prompt = list(range(40, 80))
    alone = make_sequence(prompt, [0, 1, 2], **sampling)
    chunked = make_sequence(prompt, [5, 4, 3], **sampling)
    others = [make_sequence(range(i, i + 17), [10 + 2 * i, 11 + 2 * i], **sampling) for i in range(7)]
    (expected,) = runner.execute([Scheduled(alone, 0, 40)])
    runner.execute([Scheduled(chunked, 0, 7), *(Scheduled(other, 0, 16) for other in others)])
    runner.execute([Scheduled(others[0], 16, 17), Scheduled(chunked, 7, 39)])
    results = runner.execute([*(Scheduled(other, 16, 17) for other in others), Scheduled(chunked, 39, 40)])
    assert results[-1] == expected
    pool = runner.region.view(np.float32).reshape(40, 3, 2, 2, 16, 12)
    assert np.array_equal(pool[[0, 1]], pool[[5, 4]])
    assert np.array_equal(pool[2, ..., :8, :], pool[3, ..., :8, :])


def test_a_row_with_nan_fails_alone(runner: ModelRunner) -> None:
    good, bad, other = make_sequence(range(20), [0, 1]), make_sequence([1, BAD_TOKEN, 2], [2]), make_sequence([9], [3])
    expected = [runner.execute([Scheduled(s, 0, s.num_tokens)])[0] for s in (good, other)]
    results = runner.execute([Scheduled(s, 0, s.num_tokens) for s in (good, bad, other)])
    assert [results[0], results[2]] == expected
    assert isinstance(results[1], Internal)
    # A block that held NaN serves the next sequence as any other.
    reused = make_sequence(range(20), [2, 1])
    assert runner.execute([Scheduled(reused, 0, 20)])[0] == expected[0]


def test_a_step_writes_only_the_slots_of_its_tokens(runner: ModelRunner) -> None:
    """G06: the batch is padded; no padding row may write, not even to the pool's last slot."""
    runner.region[:] = 77
    sequence = make_sequence(range(19), [4, 1])
    runner.execute([Scheduled(sequence, 0, 19)])
    pool = runner.region.reshape(40, 3, 2, 2, 16, 48)
    written = (pool != 77).any(axis=(1, 2, 3, 5))
    expected = np.zeros((40, 16), dtype=bool)
    expected[4, :], expected[1, :3] = True, True
    assert np.array_equal(written, expected)


def test_zeroing_slots_leaves_those_before_them(runner: ModelRunner) -> None:
    runner.region[:] = 1
    runner.zero_slots(5, 3)
    pool = runner.region.reshape(40, 3, 2, 2, 16, 48)
    assert not pool[5, :, :, :, 3:].any()
    assert pool.sum() == pool.size - 3 * 2 * 2 * 13 * 48


def test_a_copied_block_is_the_same_and_no_other_changes(runner: ModelRunner) -> None:
    runner.region[:] = np.arange(40, dtype=np.uint8)[:, None]
    runner.copy_blocks([])
    runner.copy_blocks([(3, 39), (3, 0), (7, 8)])
    expected = list(range(40))
    expected[39], expected[0], expected[8] = 3, 3, 7
    assert (runner.region == np.array(expected, dtype=np.uint8)[:, None]).all()


def test_blocks_come_back_from_host_memory_as_they_went_and_no_others_change(runner: ModelRunner) -> None:
    assert runner.num_host_blocks == parse_size(EngineConfig.swap_space) // runner.layout.block_bytes
    content = np.random.default_rng(0).integers(256, size=runner.region.shape, dtype=np.uint8)
    runner.region[:] = content
    last = runner.num_host_blocks - 1
    runner.swap_out([])
    runner.swap_out([(3, 0), (39, last), (0, 7)])
    assert np.array_equal(runner.region, content)
    runner.region[:] = 1
    runner.swap_in([(last, 2), (0, 3)])
    runner.swap_in([(last, 5)])
    expected = np.ones_like(content)
    expected[2], expected[3], expected[5] = content[39], content[3], content[39]
    assert np.array_equal(runner.region, expected)


def test_host_memory_takes_no_page_before_it_is_used() -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    before = resident_bytes()
    cache = KVCache(layout, 1, num_host_blocks=2**30 // layout.block_bytes)
    assert resident_bytes() - before < 2**28
    cache.swap_out([(0, cache.num_host_blocks - 1)])


@pytest.mark.parametrize("swap_space", ["0", "0GiB"])
def test_without_swap_space_there_is_no_host_block(folder: Path, swap_space: str) -> None:
    runner = load(folder, swap_space=swap_space)
    assert runner.num_host_blocks == 0
    runner.close()


def test_a_sequence_goes_on_from_copied_blocks_as_from_its_own(runner: ModelRunner) -> None:
    """Two choices part in the middle of a block: each goes on in a copy of it, over the same block before it."""
    prompt = list(range(50, 70))
    sequence = make_sequence(prompt, [0, 1])
    runner.execute([Scheduled(sequence, 0, 20)])
    runner.copy_blocks([(1, 2)])
    forks = [make_sequence([*prompt, token], blocks) for token, blocks in [(9, [0, 1]), (11, [0, 2])]]
    together = runner.execute([Scheduled(fork, 20, 21) for fork in forks])
    alone = [make_sequence([*prompt, token], [5, 6]) for token in (9, 11)]
    assert together == [runner.execute([Scheduled(sequence, 0, 21)])[0] for sequence in alone]


def test_an_unforked_sequence_samples_all_its_choices_and_each_is_what_it_is_alone(runner: ModelRunner) -> None:
    sampling = {"temperature": 1.0, "seed": 7, "logprobs": 2}
    (together,) = runner.execute([Scheduled(make_sequence(range(20), [0, 1], n=4, **sampling), 0, 20)])
    assert isinstance(together, Row)
    assert len({sampled.token_id for sampled in together.sampled}) > 1
    for choice, expected in enumerate(together.sampled):
        sequence = make_sequence(range(20), [2, 3], **sampling)
        sequence.choice = choice
        assert runner.execute([Scheduled(sequence, 0, 20)]) == [Row((expected,))]


def test_a_forked_sequence_samples_its_own_choice_alone(runner: ModelRunner) -> None:
    sequence = make_sequence(range(20), [0, 1], n=4, temperature=1.0)
    sequence.choice = 2
    sequence.token_ids.append(5)
    assert num_sampled(runner.execute([Scheduled(sequence, 0, 21)])[0]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_asked_for_is_that_of_kv_and_compute(folder: Path, dtype: str) -> None:
    runner = load(folder, dtype=dtype)
    assert runner.layout.dtype == dtype
    assert runner.region.shape == (40, runner.layout.block_bytes)
    assert num_sampled(runner.execute([Scheduled(make_sequence([1, 2], [0]), 0, 2)])[0]) == 1
    runner.close()


def test_auto_takes_the_checkpoints_dtype_and_float32_where_the_cpu_has_no_bfloat16(tmp_path: Path) -> None:
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    for stored, expected in {"float32": "float32", "bfloat16": "bfloat16" if has_bfloat16 else "float32"}.items():
        runner = load(make_tiny_model(tmp_path / stored, torch_dtype=stored))
        assert runner.layout.dtype == expected
        runner.close()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_model_len": 129}, "max_model_len = 129: the model's own limit is 128"),
        ({"num_blocks": 0, "kv_cache_size": "1KiB"}, "kv_cache_size = 1KiB: less than one block"),
        ({"num_blocks": 2**50}, "no memory for 1125899906842624 KV blocks"),
        ({"swap_space": "1KiB"}, "swap_space = 1KiB: less than one block"),
        ({"swap_space": "1000000000GiB"}, "host blocks"),
        ({"swap_space": "much"}, "size 'much'"),
        ({"device": "cuda"}, "device = cuda"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(folder: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(folder, **config)
    assert named in error.value.message


def test_the_pool_takes_as_many_blocks_as_its_size_holds(folder: Path) -> None:
    runner = load(folder, num_blocks=0, kv_cache_size="1MiB", max_model_len=100)
    assert runner.num_blocks == 2**20 // runner.layout.block_bytes
    assert runner.max_model_len == 100
    runner.close()


def test_a_pool_in_shared_memory_is_what_others_map() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype="bfloat16")
    shared = SharedMemory.create(3 * layout.block_bytes, "kvrelay-test")
    cache = KVCache(layout, 3, shared=shared)
    assert cache.region_fd is not None
    theirs = SharedMemory(os.dup(cache.region_fd), 3 * layout.block_bytes)
    memory = memoryview(theirs.buffer).cast("B")
    cache.pool[2] = 1.0
    assert memory[2 * layout.block_bytes :] == b"\x80\x3f" * (layout.block_bytes // 2)
    memory[: layout.block_bytes] = b"\x05" * layout.block_bytes
    assert (cache.region[0] == 5).all()
    assert cache.region_fd == shared.descriptor
    assert KVCache(layout, 3).region_fd is None


@pytest.mark.parametrize("is_shared", [False, True])
def test_fetching_the_pools_pages_in_the_background_changes_no_byte(is_shared: bool) -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    shared = SharedMemory.create(1000 * layout.block_bytes, "kvrelay-test") if is_shared else None
    cache = KVCache(layout, 1000, shared=shared)
    cache.region[:500] = 3
    cache.populate()
    cache.region[500:] = 4
    cache.close()
    assert (cache.region[:500] == 3).all()
    assert (cache.region[500:] == 4).all()
