"""What one node gives by itself: the engine in this process, without threads and without a connector."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.request import Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.scheduler import Scheduler

GREEDY = {"temperature": 0.0}


def engine_config(model: Path, **overrides: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(model), "dtype": "float32", "num_blocks": 64, "threads": 1} | overrides)


def make_request(
    prompt: Seq[int], name: str = "oracle", *, output: Seq[int] = (), deadline: float = float("inf"), **sampling: Any
) -> Request:
    """A validated request; greedy unless told otherwise."""
    params = SamplingParams(**{"max_tokens": 8, "seed": 0} | GREEDY | sampling)
    return Request(
        key=RequestKey(name, 0),
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling=params,
        deadline=deadline,
    )


class Oracle:
    """One engine with room for itself. Each `generate` starts with a cold prefix cache."""

    def __init__(self, model: Path, **overrides: Any) -> None:
        self.info: ModelInfo = read_model_info(model)
        self.config = engine_config(model, **overrides)
        self.runner = ModelRunner.load(self.info, self.config)

    def generate(self, prompt: Seq[int], **sampling: Any) -> list[int]:
        """The output tokens of one request alone."""
        return self.generate_all([make_request(prompt, **sampling)])[0]

    def generate_all(self, requests: Seq[Request]) -> list[list[int]]:
        """The output tokens of requests that run together."""
        pool = BlockPool(self.runner.num_blocks, self.config.block_size)
        scheduler = Scheduler(self.config, pool, LocalAdmission(self.config.block_size, self.config.watermark))
        engine = Engine(scheduler, self.runner, self.info.eos_token_ids, MonotonicClock())
        sequences = [Sequence(request) for request in requests]
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.waiting or scheduler.running:
            for row in engine.execute(*engine.plan()).outputs:
                assert row.error is None, row.error
        assert pool.counts().owned == 0
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    def close(self) -> None:
        self.runner.close()
