"""The engine's benchmark over an executor that takes a known time."""

from collections.abc import Sequence as Seq

import pytest

from kvrelay.engine.bench import BenchPlan, Measurement, Rig, Run, measure
from kvrelay.engine.clock import FakeClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.errors import ConfigError, Internal
from kvrelay.engine.kv_layout import KVLayout
from kvrelay.engine.step import Row, RowResult, Sampled, Scheduled


class TimedExecutor:
    """A step takes 10 ms, and a millisecond a token. Samples token 1."""

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")
    region = None
    num_host_blocks = 0

    def __init__(self, clock: FakeClock, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.steps: list[tuple[int, ...]] = []  # tokens of each row
        self.fails = False
        self._clock = clock

    def execute(self, scheduled: Seq[Scheduled]) -> list[RowResult]:
        if self.fails:
            return [Internal("as asked") for _ in scheduled]
        self.steps.append(tuple(item.num_new_tokens for item in scheduled))
        self._clock.advance(0.01 + 0.001 * sum(self.steps[-1]))
        return [Row((Sampled(1),) if item.samples else ()) for item in scheduled]

    def copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        raise AssertionError("nothing is forked")

    def swap_out(self, copies: Seq[tuple[int, int]]) -> None:
        raise AssertionError("nothing is preempted")

    def swap_in(self, copies: Seq[tuple[int, int]]) -> None:
        raise AssertionError("nothing is preempted")

    def zero_slots(self, block_id: int, first_slot: int) -> None:
        raise AssertionError("nothing lands")


def make_rig(num_blocks: int = 200, **options: object) -> tuple[Rig, TimedExecutor]:
    given = {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8} | options
    clock = FakeClock()
    executor = TimedExecutor(clock, num_blocks)
    return Rig(EngineConfig(**given), executor, clock, vocab_size=100, max_model_len=300), executor


def test_decode_counts_whole_batches_of_one_token_each() -> None:
    rig, executor = make_rig()
    runs = rig.decode(batch_size=4, context=8, num_steps=10, repeats=3)
    assert len(runs) == 3
    for run in runs:
        assert run.step_ms == pytest.approx(14)
        assert run.tokens_per_s == pytest.approx(4 / 0.014)
        assert (run.first_len, run.last_len) == (9, 19)  # the prompt and its first token; ten more
    assert executor.steps.count((1, 1, 1, 1)) == 4 + 3 * 10


def test_a_long_batch_is_computed_once_and_measured_from_equal_lengths() -> None:
    rig, executor = make_rig()
    runs = rig.decode(batch_size=4, context=40, num_steps=5, repeats=2)
    assert {(run.first_len, run.last_len) for run in runs} == {(41, 46)}
    # Each repeat computes what no full block holds: 40 tokens are ten blocks, and the last token is never cached.
    assert executor.steps.count((4, 4, 4, 4)) == 2


def test_without_a_prefix_cache_the_lengths_are_said_as_they_are() -> None:
    rig, _ = make_rig(prefix_caching=False)
    (run,) = rig.decode(batch_size=4, context=40, num_steps=5, repeats=1)
    assert run.first_len > 41
    assert run.last_len == run.first_len + 5
    assert run.tokens_per_s == pytest.approx(4 / 0.014)


def test_prefill_counts_every_chunk_of_a_prompt_that_nothing_holds() -> None:
    rig, executor = make_rig()
    runs = rig.prefill(num_tokens=72, repeats=2)
    assert executor.steps == [(32,), (32,), (8,)] * 3  # one to warm up
    assert (
        runs == [Run(first_len=0, last_len=72, tokens_per_s=pytest.approx(72 / 0.102), step_ms=pytest.approx(42))] * 2
    )


def test_all_that_is_planned_is_measured_and_leaves_no_block() -> None:
    rig, _ = make_rig()
    plan = BenchPlan(batch_sizes=(1, 2), contexts=(4, 9), decode_steps=3, prompt_lens=(16,), repeats=2, seed=0)
    heard: list[str] = []
    measured = measure(rig, plan, heard.append)
    assert len(heard) == len(measured) == plan.num_shapes == 5
    decode = [("decode", 1, 4), ("decode", 2, 4), ("decode", 1, 9), ("decode", 2, 9)]
    assert [(m.kind, m.batch_size, m.num_tokens) for m in measured] == [*decode, ("prefill", 1, 16)]
    assert all(isinstance(m, Measurement) and len(m.runs) == 2 for m in measured)
    counts = rig._scheduler.pool.counts()
    assert counts.free + counts.cached == counts.total


@pytest.mark.parametrize(
    ("batch_size", "context", "options", "says"),
    [
        (9, 8, {}, "batch size 9: a step takes 8"),
        (8, 8, {"max_num_batched_tokens": 4}, "batch size 8: a step takes 4"),
        (1, 290, {}, "301 tokens a sequence: the context has 300"),
        (8, 90, {}, r"8 sequences of \d+ tokens take \d+ KV blocks: there are 200, 10 of them below the watermark"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    batch_size: int, context: int, options: dict[str, int], says: str
) -> None:
    rig, executor = make_rig(**options)
    with pytest.raises(ConfigError, match=says):
        rig.decode(batch_size, context, num_steps=10, repeats=1)
    assert executor.steps == []


def test_a_row_that_fails_ends_the_benchmark() -> None:
    rig, executor = make_rig()
    executor.fails = True
    with pytest.raises(Internal, match="as asked"):
        rig.prefill(8, repeats=1)
