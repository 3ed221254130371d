"""Measures the engine in this process: model, scheduler and sampler, without the network and the threads of a node.

A decode figure counts steps in which every sequence of a batch gets one token; a prefill figure the steps from a
prompt's start to its first token. Both hold all that a node's engine thread does in a step. Each shape runs once
unmeasured; that pass of a decode batch also leaves its prompts in the prefix cache, from which the measured ones start.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from statistics import median

from kvrelay.engine import model_store
from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import Clock, MonotonicClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.errors import ConfigError
from kvrelay.engine.kv_layout import blocks_for
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.step import Executor

_WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_steps: int
    prompt_lens: tuple[int, ...]
    repeats: int
    seed: int

    @property
    def num_shapes(self) -> int:
        """How many measurements that makes."""
        return len(self.prompt_lens) + len(self.batch_sizes) * len(self.contexts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One repeat of one measurement."""

    first_len: float  # tokens of a sequence, its mean over the batch: before the first measured step
    last_len: float  # after the last
    tokens_per_s: float
    step_ms: float  # the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All repeats of one shape."""

    kind: str  # "decode" or "prefill"
    batch_size: int
    num_tokens: int  # of each prompt
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What computed."""

    model: str
    architecture: str
    torch: str
    dtype: str
    kernels: str
    num_threads: int
    num_blocks: int


class Rig:
    """One engine and the requests that a benchmark gives it. Belongs to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._vocabulary = range(vocab_size)
        self._max_model_len = max_model_len
        self._random = random.Random(seed)
        self._num_requests = 0
        pool = BlockPool(executor.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
        self._scheduler = Scheduler(config, pool, LocalAdmission(config.block_size, config.watermark))
        self._engine = Engine(self._scheduler, executor, (), clock)

    def decode(self, batch_size: int, context: int, num_steps: int, repeats: int) -> list[Run]:
        """Whole batches of prompts of `context` tokens, `num_steps` steps each.

        Raises: ConfigError if the batch does not fit.
        """
        self._check_batch_fits(batch_size, context, num_steps)
        prompts = [self._prompt(context) for _ in range(batch_size)]
        self.decode_batch(prompts, min(num_steps, _WARM_UP_STEPS))
        return [self.decode_batch(prompts, num_steps) for _ in range(repeats)]

    def prefill(self, num_tokens: int, repeats: int) -> list[Run]:
        """Prompts of `num_tokens` tokens, each alone and unlike the others.

        Raises: ConfigError if one does not fit.
        """
        return [self.prefill_prompt(self._prompt(num_tokens)) for _ in range(repeats + 1)][1:]

    def decode_batch(self, prompts: Seq[Seq[int]], num_steps: int) -> Run:
        """One pass over prompts of one length: from where all have a token, `num_steps` steps.

        Raises: ConfigError if they do not fit.
        """
        max_tokens = self._check_batch_fits(len(prompts), len(prompts[0]), num_steps)
        sequences = [self._add(prompt, max_tokens) for prompt in prompts]
        while not all(sequence.num_output_tokens for sequence in sequences):
            self._step()
        first_len = _mean_len(sequences)
        steps_s = [self._step() for _ in range(num_steps)]
        last_len = _mean_len(sequences)
        for sequence in sequences:
            self._scheduler.abort(sequence)
        return _run(first_len, last_len, (last_len - first_len) * len(sequences), steps_s)

    def prefill_prompt(self, prompt: Seq[int]) -> Run:
        """One prompt alone, to its first token. Raises: ConfigError if it does not fit."""
        num_tokens = len(prompt)
        self._check_fits(1, num_tokens + 1)
        sequence = self._add(prompt, 1)
        steps_s = []
        while not sequence.num_output_tokens:
            steps_s.append(self._step())
        return _run(0, num_tokens, num_tokens, steps_s)

    def _check_batch_fits(self, batch_size: int, context: int, num_steps: int) -> int:
        """Returns: tokens that a sequence may need until the whole batch has made its steps."""
        # Without a prefix cache the first ones decode while the prompts of the last are computed.
        budget = max(1, self._config.max_num_batched_tokens - batch_size)
        max_tokens = num_steps + 1 + (batch_size - 1) * (-(-context // budget) + 1)
        self._check_fits(batch_size, context + max_tokens)
        return max_tokens

    def _check_fits(self, batch_size: int, num_tokens: int) -> None:
        config, num_blocks = self._config, self._scheduler.pool.num_blocks
        most_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)
        if batch_size > most_sequences:
            raise ConfigError(
                f"batch size {batch_size}: a step takes {most_sequences} (--max-num-seqs, --max-num-batched-tokens)"
            )
        if num_tokens > self._max_model_len:
            raise ConfigError(f"{num_tokens} tokens a sequence: the context has {self._max_model_len}")
        wanted = batch_size * blocks_for(num_tokens, config.block_size)
        spare = self._scheduler.admission.watermark_blocks(num_blocks) if batch_size > 1 else 0
        if wanted > num_blocks - spare:
            raise ConfigError(
                f"{batch_size} sequences of {num_tokens} tokens take {wanted} KV blocks: there are {num_blocks},"
                f" {spare} of them below the watermark (--kv-cache-size)"
            )

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._vocabulary, k=num_tokens))

    def _add(self, prompt: Seq[int], max_tokens: int) -> Sequence:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        key = RequestKey(f"bench-{self._num_requests:08}", 0)
        sequence = Sequence(Request(key=key, prompt_token_ids=tuple(prompt), sampling=sampling))
        self._scheduler.add(sequence)
        return sequence

    def _step(self) -> float:
        """One step. Returns: its seconds. Raises: KvrelayError of a row that failed."""
        started_at = self._clock.now()
        outcome = self._engine.execute(*self._engine.plan())
        duration_s = self._clock.now() - started_at
        assert outcome.outputs, "nothing was scheduled"
        for row in outcome.outputs:
            if row.error is not None:
                raise row.error
        return duration_s


def run(config: EngineConfig, plan: BenchPlan, on_measured: Callable[[str], None]) -> tuple[Setup, list[Measurement]]:
    """Load the model and measure. `on_measured` hears of each measurement that is done.

    Raises: KvrelayError.
    """
    with loaded(config, plan.seed) as (setup, rig):
        return setup, measure(rig, plan, on_measured)


@contextlib.contextmanager
def loaded(config: EngineConfig, seed: int = 0) -> Iterator[tuple[Setup, Rig]]:
    """A model with an engine to measure. Raises: KvrelayError."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as on a node; to be set before torch is loaded
    info = model_store.load_info(config.model)
    import torch

    from kvrelay.engine.model_runner import ModelRunner

    runner = ModelRunner.load(info, config)
    setup = Setup(
        model=info.name,
        architecture=info.architecture,
        torch=torch.__version__,
        dtype=runner.layout.dtype,
        kernels=runner.kernels_name,
        num_threads=runner.num_threads,
        num_blocks=runner.num_blocks,
    )
    rig = Rig(
        config,
        runner,
        MonotonicClock(),
        vocab_size=info.vocab_size,
        max_model_len=runner.max_model_len,
        seed=seed,
    )
    try:
        yield setup, rig
    finally:
        runner.close()


def measure(rig: Rig, plan: BenchPlan, on_measured: Callable[[str], None]) -> list[Measurement]:
    """All that is planned, decode first. Raises: KvrelayError."""
    measured = []
    for context in plan.contexts:
        for batch_size in plan.batch_sizes:
            runs = rig.decode(batch_size, context, plan.decode_steps, plan.repeats)
            measured.append(Measurement(kind="decode", batch_size=batch_size, num_tokens=context, runs=tuple(runs)))
            on_measured(f"decode {batch_size}")
    for num_tokens in plan.prompt_lens:
        runs = rig.prefill(num_tokens, plan.repeats)
        measured.append(Measurement(kind="prefill", batch_size=1, num_tokens=num_tokens, runs=tuple(runs)))
        on_measured(f"prefill {num_tokens}")
    return measured


def _run(first_len: float, last_len: float, num_tokens: float, steps_s: list[float]) -> Run:
    return Run(
        first_len=first_len,
        last_len=last_len,
        tokens_per_s=num_tokens / sum(steps_s),
        step_ms=median(steps_s) * 1e3,
    )


def _mean_len(sequences: Seq[Sequence]) -> float:
    return sum(sequence.num_tokens for sequence in sequences) / len(sequences)
