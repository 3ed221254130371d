"""What one node gives by itself: the engine in this process, without threads and without a connector."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrelay.engine.admission import LocalAdmission
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.clock import MonotonicClock
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine, RowOutput
from kvrelay.engine.model_info import ModelInfo, read_model_info
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.request import Logprobs, Matcher, OutputToken, Request, RequestKey, SamplingParams, Sequence
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.structured_output import FormCompiler

GREEDY = {"temperature": 0.0}


def engine_config(model: Path, **overrides: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(model), "dtype": "float32", "num_blocks": 64, "threads": 1} | overrides)


def matcher_of(compiler: FormCompiler, request: Request) -> Matcher | None:
    """What a node has made of a request's form, before its engine hears of it."""
    form = request.sampling.structured_output
    return None if form is None else compiler.compile(form, request.output_token_ids)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that every tiny model knows."""
    return [random.Random(f"{seed}/{length}").randrange(256) for _ in range(length)]


def make_request(
    prompt: Seq[int],
    name: str = "oracle",
    *,
    output: Seq[int] = (),
    choice: int = 0,
    deadline: float = float("inf"),
    priority: int = 0,
    **sampling: Any,
) -> Request:
    """A validated request; greedy unless told otherwise."""
    params = SamplingParams(**{"max_tokens": 8, "seed": 0} | GREEDY | sampling)
    return Request(
        key=RequestKey(name, 0),
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        choice=choice,
        sampling=params,
        deadline=deadline,
        priority=priority,
    )


@dataclass
class OracleAnswer:
    """New tokens by choice, in order, and the prompt's log-probabilities."""

    choices: dict[int, list[OutputToken]] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, row: RowOutput) -> None:
        assert not row.prompt_logprobs or row.first_prompt_index == len(self.prompt_logprobs)
        self.prompt_logprobs += row.prompt_logprobs
        for token in row.tokens:
            self.choices.setdefault(token.choice, []).append(token)

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token.token_id for token in self.choices[choice]]


class Oracle:
    """One engine with room for itself. Each `generate` starts with a cold prefix cache."""

    def __init__(self, model: Path, *, gguf: Path | None = None, **overrides: Any) -> None:
        self.info: ModelInfo = read_model_info(model, gguf=gguf)
        self.config = engine_config(model, **overrides)
        self.runner = ModelRunner.load(self.info, self.config)
        self._compiler = FormCompiler(self.info)

    def generate(self, prompt: Seq[int], **sampling: Any) -> list[int]:
        """The output tokens of one request alone."""
        return self.generate_all([make_request(prompt, **sampling)])[0]

    def generate_all(self, requests: Seq[Request]) -> list[list[int]]:
        """The output tokens of requests of one choice that run together."""
        answers = self.run(requests)
        return [
            [*request.output_token_ids, *answer.token_ids(request.choice)]
            for request, answer in zip(requests, answers, strict=True)
        ]

    def answer(self, request: Request) -> OracleAnswer:
        """All that there is to know of one request alone."""
        return self.run([request])[0]

    def run(self, requests: Seq[Request]) -> list[OracleAnswer]:
        """All that there is to know of requests that run together."""
        pool = BlockPool(self.runner.num_blocks, self.config.block_size)
        scheduler = Scheduler(self.config, pool, LocalAdmission(self.config.block_size, self.config.watermark))
        engine = Engine(scheduler, self.runner, self.info.eos_token_ids, MonotonicClock())
        answers = {request.key: OracleAnswer() for request in requests}
        for request in requests:
            scheduler.add(Sequence(request, matcher=matcher_of(self._compiler, request)))
        while scheduler.waiting or scheduler.running or scheduler.swapped:
            for row in engine.execute(*engine.plan()).outputs:
                assert row.error is None, row.error
                answers[row.sequence.key].take(row)
        assert pool.counts().owned == 0
        return [answers[request.key] for request in requests]

    def close(self) -> None:
        self.runner.close()
