"""From the flags to what a load asks for: random prompts, or those of a file that fit the model's context."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.cli.bench_config import ServeBenchConfig
from kvrelay.cli.bench_files import read_sharegpt, read_trace
from kvrelay.cli.bench_workload import ListedPrompts, PromptSource, TracedPrompts, Workload, parse_lengths
from kvrelay.cli.client import ModelView
from kvrelay.engine.errors import ConfigError

Tokenize = Callable[[str], Awaitable[tuple[int, ...]]]
AT_ONCE = 16  # texts that are counted at the same time
MAX_COUNTED = 10_000  # conversations that are counted at most where no number of prompts is given


@dataclass(frozen=True, slots=True)
class Load:
    """What a load asks for, and when if that is given. `warnings` is for the user."""

    source: PromptSource
    arrivals_s: Sequence[float] | None = None
    warnings: tuple[str, ...] = ()


async def prepare(
    config: ServeBenchConfig, model: ModelView, vocabulary: Sequence[int], tokenize: Tokenize | None = None
) -> Load:
    """`tokenize` is needed for --sharegpt. Raises: KvrelayError if nothing fits the model, or a file is malformed."""
    if config.trace:
        return _traced(config, model, vocabulary)
    if config.sharegpt and tokenize:
        return await _conversations(config, model, vocabulary, tokenize)
    return Load(
        Workload(
            seed=config.seed,
            vocabulary=vocabulary,
            max_model_len=model.max_model_len,
            input_lengths=parse_lengths("input_len", config.input_len),
            output_lengths=parse_lengths("output_len", config.output_len),
            num_prefixes=config.num_prefixes,
            prefix_len=config.prefix_len,
        )
    )


def _traced(config: ServeBenchConfig, model: ModelView, vocabulary: Sequence[int]) -> Load:
    """All of a trace that fits, at its own times."""
    found = read_trace(config.trace)
    requests = [one for one in found if one.num_input_tokens + one.num_output_tokens <= model.max_model_len]
    if not requests:
        raise ConfigError(f"trace {config.trace}: none of its {len(found)} requests fits {_context(model)}")
    left_out = len(found) - len(requests)
    warnings = (f"{left_out} of the trace's {len(found)} requests do not fit {_context(model)}",) if left_out else ()
    source = TracedPrompts(requests, seed=config.seed, vocabulary=vocabulary)
    return Load(source, [request.arrival_s for request in requests], warnings)


async def _conversations(
    config: ServeBenchConfig, model: ModelView, vocabulary: Sequence[int], tokenize: Tokenize
) -> Load:
    """Questions drawn from a file; those that do not fit are passed over."""
    exchanges = read_sharegpt(config.sharegpt)
    random.Random(f"{config.seed}/sharegpt").shuffle(exchanges)
    wanted = config.num_prompts or (MAX_COUNTED if config.duration_s else 100)
    listed: list[tuple[tuple[int, ...], int]] = []
    counted = 0
    while len(listed) < wanted and counted < len(exchanges):
        batch = exchanges[counted : counted + min(AT_ONCE, wanted - len(listed))]
        texts = [text for exchange in batch for text in (exchange.question, exchange.answer)]
        tokens = await asyncio.gather(*(tokenize(text) for text in texts))
        counted += len(batch)
        for question, answer in zip(tokens[::2], tokens[1::2], strict=True):
            if question and answer and len(question) + len(answer) <= model.max_model_len:
                listed.append((question, len(answer)))
    if not listed:
        raise ConfigError(f"sharegpt {config.sharegpt}: none of its conversations fits {_context(model)}")
    short = config.num_prompts and len(listed) < config.num_prompts
    warnings = (f"the file has only {len(listed)} conversations that fit {_context(model)}",) if short else ()
    return Load(ListedPrompts(listed, seed=config.seed, vocabulary=vocabulary), None, warnings)


def _context(model: ModelView) -> str:
    return f"the model's context of {model.max_model_len} tokens"
