"""Answers in one piece: for a client that does not stream, each choice once, when it has ended."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvrelay.engine.request import Logprobs
from kvrelay.router.api import Output


@dataclass(slots=True)
class _Gathered:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


async def whole(outputs: AsyncGenerator[Output]) -> AsyncGenerator[Output]:
    """One output a choice: its whole text, all tokens and their log-probabilities; the prompt's are in the first.

    Holds what the request itself bounds: n * max_tokens, and the prompt. Closes `outputs`, and is to be closed.
    """
    gathered: dict[int, _Gathered] = {}
    prompt_logprobs: list[Logprobs] = []
    async with aclosing(outputs):
        async for output in outputs:
            prompt_logprobs.extend(output.prompt_logprobs)
            choice = gathered.setdefault(output.choice, _Gathered())
            choice.texts.append(output.text)
            choice.token_ids.extend(output.token_ids)
            choice.logprobs.extend(output.logprobs)
            if output.finish_reason is not None:
                del gathered[output.choice]
                yield replace(
                    output,
                    text="".join(choice.texts),
                    token_ids=choice.token_ids,
                    first_token_index=0,
                    logprobs=choice.logprobs,
                    prompt_logprobs=prompt_logprobs,
                    first_prompt_index=0,
                )
                prompt_logprobs = []
